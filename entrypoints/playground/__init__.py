"""The playground: pages that the server itself serves, and the files they are made of."""

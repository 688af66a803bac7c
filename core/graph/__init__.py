"""What a request is made of: its workflow as a graph of nodes, and how far it has come through it."""

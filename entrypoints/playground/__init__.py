"""The playground: web pages for trying the server, which it serves itself, and their static files."""

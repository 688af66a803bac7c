"""The API server's side of its engines: routing, connections, restarts."""

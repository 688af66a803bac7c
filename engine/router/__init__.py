"""Several engines as one: routing, connections, restarts."""

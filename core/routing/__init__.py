"""Routing: whether a request is admitted, and which engine it goes to."""

"""Workflows as graphs of nodes, and a request's progress through them."""

"""Metrics and traces of the API server and the engines."""

"""Middleware: who may ask, how often, and what is recorded of it."""

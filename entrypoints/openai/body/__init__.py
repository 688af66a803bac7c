"""Reads request bodies while they arrive."""

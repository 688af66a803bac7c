"""Resolves what a request leaves open: its model, sampling parameters, and whether it runs mask-aware."""

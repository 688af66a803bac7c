"""Soak test of a server: mixed traffic, faults, checked answers, and resource use over time."""

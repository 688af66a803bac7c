"""Measures latencies and memory on this machine."""

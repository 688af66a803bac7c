"""Weights in shared memory: a process that loads them once per machine, and how workers take them from it."""

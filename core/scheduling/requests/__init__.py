"""Requests: the scheduler's records of them, their order between owners, and when they are due."""

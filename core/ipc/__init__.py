"""Bricks that every process needs to talk to another: shared arrays, rings, child processes. Imports only `core`."""

"""Processes beside the engines: the keeper of weights, and the launcher of workers."""

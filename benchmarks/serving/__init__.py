"""Measurements on whole servers and engines."""

"""Builds answers: results, events, errors, statistics."""

"""Measurements of single parts: a step, a decision, a model of costs."""

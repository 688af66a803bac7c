"""Policies as papers describe them, to compare with."""

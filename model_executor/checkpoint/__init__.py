"""Checkpoints on disk: finding, checking, reading and describing them."""

"""Checkpoints: downloading, checking, reading and describing them."""

"""Samplers: diffusers' schedulers run on named tensors, with no state in an object between steps."""

"""Samplers: diffusers' schedulers on named tensors instead of a stateful object."""

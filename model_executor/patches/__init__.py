"""Patches: what changes a model's layers without being a model, such as LoRA adapters."""

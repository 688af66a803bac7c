"""LoRA adapters: what changes a model without being one."""

"""What a worker keeps between batches: tensors, embedded prompts, and values from other ranks."""

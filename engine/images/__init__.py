"""Image processing outside the model: decoding, masks, cropping, pasting back, encoding; and the pool of processes for it."""

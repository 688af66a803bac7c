"""Image processing outside the model (decode, mask, crop, paste back, encode), and the pool of processes for it."""

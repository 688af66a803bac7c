"""Sessions: what happens to one request from its arrival until its memory is freed."""

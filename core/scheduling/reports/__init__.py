"""Reports: predictions of the work left, and what the engine tells about itself."""

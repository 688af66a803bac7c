"""Cached pages as tensors and as files, and the copies between the device, host and disk tiers."""

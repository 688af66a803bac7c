"""Cached pages as tensors and files, and the copies between tiers."""

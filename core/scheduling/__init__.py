"""Which work runs next on an engine's workers."""

"""The activation cache: which templates' activations are kept, on which tier, and how they are primed (computed)."""

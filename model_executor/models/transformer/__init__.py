"""The forward pass of transformer denoisers (DiTs)."""

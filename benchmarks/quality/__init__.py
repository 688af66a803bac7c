"""How close mask-aware edits stay to exact ones."""

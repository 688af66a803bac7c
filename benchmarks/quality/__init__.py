"""How close mask-aware edits are to exact ones."""

"""Ranks: which are up, what runs on them, which components they have loaded, and how large a step may be."""

"""Templates: their uploads and cached pages by id, and results that become templates."""

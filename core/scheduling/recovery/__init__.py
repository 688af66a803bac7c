"""Recovery: how requests go on when a rank's worker dies."""

"""Development tools: random test checkpoints, and training of the project's own models. The server imports none."""

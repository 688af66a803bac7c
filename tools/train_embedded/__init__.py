"""Training of the embedded model: drawn scenes, metrics, and the stages from `vae` to `gallery`."""

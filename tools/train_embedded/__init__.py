"""Training of the embedded model: scenes, metrics, and the stages vae, denoiser, distil, export and evaluate."""

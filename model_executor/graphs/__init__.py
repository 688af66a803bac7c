"""CUDA graphs of denoising steps."""

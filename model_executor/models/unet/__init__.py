"""The forward pass of UNet denoisers."""

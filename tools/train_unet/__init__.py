"""Training of the small UNet that docs/quality.md measures. The server does not need it."""

"""How the small UNet of docs/quality.md was made; the server needs none of this."""

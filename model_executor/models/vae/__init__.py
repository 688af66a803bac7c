"""VAEs: pictures to latents and back."""

"""A picture in two passes: a smaller one first, whose enlarged latents a second pass paints over.

Requests say `hires_scale`, and may say `hires_strength`.
"""

from __future__ import annotations

from entrypoints.workflows import Image, Workflow, steps
from entrypoints.workflows.families import VAE, Denoiser, LatentsGenerator, TextEncoder, Upscaler, denoise

with Workflow(name="two_passes") as workflow:
    seed, number = workflow.add_input("seed", int), workflow.add_input("number", int)
    image, mask = (workflow.add_input(name, Image, required=False) for name in ("image", "mask"))
    scale, strength = (workflow.add_input(name, float) for name in ("hires_scale", "hires_strength"))
    latents_generator, denoiser = LatentsGenerator(), Denoiser()
    prompt_embeds = TextEncoder()(workflow.add_input("prompt", str))
    latents = latents_generator(seed, image, mask, scale=scale)
    for _ in steps(number):
        noise_pred = denoiser(latents, prompt_embeds)
        latents = denoise(noise_pred, latents)
    larger = Upscaler()(latents)
    latents = latents_generator(seed, image, mask, latents=larger, strength=strength)
    for _ in steps(number):
        noise_pred = denoiser(latents, prompt_embeds)
        latents = denoise(noise_pred, latents)
    workflow.add_output(VAE()(latents), name="picture")

"""A picture by a model with two adapters, whose last steps another model makes, its refiner, without them.

A model is served with this workflow, with adapters called "style" and "subject", and with a `refiner`. Or, while the
server runs, it is registered as guarded.py is, with `?model=NAME&refiner=OTHER`.
"""

from __future__ import annotations

from entrypoints.workflows import Image, Workflow, steps
from entrypoints.workflows.families import VAE, Denoiser, LatentsGenerator, LoRA, TextEncoder, denoise

with Workflow(name="two_loras_refined") as workflow:
    seed, number = workflow.add_input("seed", int), workflow.add_input("number", int)
    prompt, share = workflow.add_input("prompt", str), workflow.add_input("refiner_start", float)
    image, mask = (workflow.add_input(name, Image, required=False) for name in ("image", "mask"))
    base, refiner = Denoiser(), Denoiser(role="refiner")
    base.add_patch(LoRA("style", 0.8))
    base.add_patch(LoRA("subject", 0.5))
    prompt_embeds = TextEncoder()(prompt)
    latents = LatentsGenerator()(seed, image, mask, denoising_end=share)
    for _ in steps(number):
        noise_pred = base(latents, prompt_embeds)
        latents = denoise(noise_pred, latents)
    prompt_embeds = TextEncoder(role="refiner")(prompt)
    latents = LatentsGenerator(role="refiner")(seed, image, mask, latents=latents, denoising_start=share)
    for _ in steps(number):
        noise_pred = refiner(latents, prompt_embeds)
        latents = denoise(noise_pred, latents)
    workflow.add_output(VAE()(latents), name="picture")

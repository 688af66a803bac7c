"""A picture of a prompt by FLUX, as LegoDiffusion's figure 7 writes it, without its adapters."""

from __future__ import annotations

from entrypoints.workflows import Workflow, steps
from entrypoints.workflows.families import Flux, FluxTextEncoder, FluxVAE, LatentsGenerator, denoise

# create a workflow instance
workflow = Workflow(name="figure7")
# initialize models
latents_generator = LatentsGenerator()
text_enc = FluxTextEncoder()
flux = Flux()
vae = FluxVAE()
# initialize input placeholders for the workflow
seed = workflow.add_input(name="seed", data_type=int)
prompt = workflow.add_input(name="prompt", data_type=str)
num_denoising_steps = workflow.add_input(name="num_denoising_steps", data_type=int)
# invoke models and establish their dependencies
latents = latents_generator(seed)
prompt_embeds = text_enc(prompt)
# iterative denoising
for _ in steps(num_denoising_steps):
    noise_pred = flux(latents, prompt_embeds)
    latents = denoise(noise_pred, latents)
output_img = vae(latents, mode="decode")
workflow.add_output(output_img, name="picture")

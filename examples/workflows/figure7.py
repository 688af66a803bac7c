"""A picture of a prompt and a control picture by FLUX, as LegoDiffusion's figure 7 writes it.

What differs: the loop is over `steps(...)`. Models have no paths: a model is served with this workflow by name, with
its own checkpoint, ControlNets, and an adapter called "style". The result is called "picture".
"""

from __future__ import annotations

from entrypoints.workflows import Image, Workflow, steps
from entrypoints.workflows.families import ControlNet, Flux, FluxTextEncoder, FluxVAE, LatentsGenerator, LoRA, denoise

# create a workflow instance
workflow = Workflow(name="figure7")
# initialize models. All inherit the Model class
latents_generator = LatentsGenerator()
text_enc = FluxTextEncoder()
flux = Flux()
controlnet = ControlNet()
lora = LoRA("style")
vae = FluxVAE()
# initialize input placeholders for the workflow
seed = workflow.add_input(name="seed", data_type=int)
prompt = workflow.add_input(name="prompt", data_type=str)
num_denoising_steps = workflow.add_input(name="num_denoising_steps", data_type=int)
ref_image = workflow.add_input(name="ref_image", data_type=Image)
# add_patch() registers a LoRA adapter with the flux,
flux.add_patch(lora)
# Invoke models and establish their I/O dependencies.
# Model invocation is expressed via __call__().
latents = latents_generator(seed)
prompt_embeds = text_enc(prompt)
ref_image = vae(image=ref_image, mode="encode")
# Perform iterative denoising computation.
for _ in steps(num_denoising_steps):
    controlnet_outputs = controlnet(latents, prompt_embeds, ref_image)
    noise_pred = flux(latents, prompt_embeds, controlnet_outputs)
    latents = denoise(noise_pred, latents)
output_img = vae(latents, mode="decode")
workflow.add_output(output_img, name="picture")

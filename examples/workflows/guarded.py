"""A picture of a prompt, as in figure7.py, which a model of one's own blacks out if it is too red.

A model is served with this workflow if its entry of the catalog names it. Or, while the server runs, as `guarded`,
beside the model that makes its pictures (the first one, if `model` is left out):

    curl "localhost:8000/v1/workflows?model=NAME" -H "authorization: Bearer $ADMIN_KEY" \
      --data-binary @examples/workflows/guarded.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from entrypoints.workflows import Image, Model, Workflow, steps
from entrypoints.workflows.families import Flux, FluxTextEncoder, FluxVAE, LatentsGenerator, denoise


class Safety(Model):
    """Stands for a classifier: `load` would read its weights."""

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_input("most_red", float)
        self.add_output("picture", Image)
        self.add_output("is_safe", bool)

    def load(self, device: str, dtype: torch.dtype) -> None:
        self.red = torch.tensor([1.0, -0.5, -0.5], dtype=dtype, device=device)

    def execute(self, image: Tensor, most_red: float) -> dict[str, object]:
        is_safe = float((image.to(self.red.dtype) @ self.red).mean()) <= most_red
        return {"picture": image if is_safe else torch.zeros_like(image), "is_safe": is_safe}


with Workflow(name="guarded") as workflow:
    flux, vae = Flux(), FluxVAE()
    prompt_embeds = FluxTextEncoder()(workflow.add_input("prompt", str))
    latents = LatentsGenerator()(workflow.add_input("seed", int))
    for _ in steps(workflow.add_input("num_denoising_steps", int)):
        noise_pred = flux(latents, prompt_embeds)
        latents = denoise(noise_pred, latents)
    checked = Safety()(vae(latents, mode="decode"), workflow.add_input("most_red", float))
    workflow.add_output(checked.picture, name="picture")
    workflow.add_output(checked.is_safe, name="is_safe")

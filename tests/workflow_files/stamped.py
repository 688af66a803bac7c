"""A model's workflow with inputs of its own: a picture of a prompt, with a stamp in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from entrypoints.workflows import Image, Model, Workflow, picture, steps
from entrypoints.workflows.families import Flux, FluxTextEncoder, FluxVAE, LatentsGenerator, denoise

if TYPE_CHECKING:  # so that its import is fast
    import torch
    from torch import Tensor


class Stamp(Model):
    """Puts a stamp on a picture, as often as it is told, and says how many pixels it has."""

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_input("stamp", picture(32, 32), required=False)
        self.add_input("times", int)
        self.add_output("picture", Image)
        self.add_output("stamped", int)

    def load(self, device: str, dtype: torch.dtype) -> None:
        """It has no weights."""

    def execute(self, image: Tensor, times: int, stamp: Tensor | None = None) -> dict[str, object]:
        if stamp is None or times < 1:
            return {"picture": image, "stamped": 0}
        top, left = ((side - part) // 2 for side, part in zip(image.shape[:2], stamp.shape[:2], strict=True))
        image[top : top + stamp.shape[0], left : left + stamp.shape[1]] = stamp
        return {"picture": image, "stamped": times * stamp.shape[0] * stamp.shape[1]}


with Workflow(name="stamped") as workflow:
    flux, vae = Flux(), FluxVAE()
    prompt_embeds = FluxTextEncoder()(workflow.add_input("prompt", str))
    latents = LatentsGenerator()(workflow.add_input("seed", int))
    for _ in steps(workflow.add_input("num_denoising_steps", int)):
        noise_pred = flux(latents, prompt_embeds)
        latents = denoise(noise_pred, latents)
    times, stamp = workflow.add_input("times", int), workflow.add_input("stamp", picture(32, 32), required=False)
    stamped = Stamp()(image=vae(latents, mode="decode"), times=times, stamp=stamp)
    workflow.add_output(stamped.picture, name="picture")
    workflow.add_output(stamped.stamped, name="stamped")

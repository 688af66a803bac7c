"""A loop: diffusion of heat over a picture, as often as the request says."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from entrypoints.workflows import Image, Model, Workflow, steps, tensor

Heat = tensor("float32", 3, 512, 512)


class Encode(Model):
    """A picture as temperatures."""

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_output("latents", Heat)

    def load(self, device: str, dtype: torch.dtype) -> None:
        """It has no weights."""

    def execute(self, image: Tensor) -> dict[str, object]:
        return {"latents": image.permute(2, 0, 1).float() / 255}


class Spread(Model):
    """One step, shorter with each round."""

    def setup_io(self) -> None:
        self.add_input("heat", Heat)
        self.add_input("step", int)
        self.add_output("spread", Heat)

    def load(self, device: str, dtype: torch.dtype) -> None:
        self.kernel = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]], dtype=dtype, device=device)

    def execute(self, heat: Tensor, step: int) -> dict[str, object]:
        padded = functional.pad(heat[:, None], (1, 1, 1, 1), mode="replicate")
        flow = functional.conv2d(padded, self.kernel[None, None])[:, 0]
        return {"spread": heat + flow * 0.2 / (1 + step)}


class Decode(Model):
    """The picture of temperatures."""

    def setup_io(self) -> None:
        self.add_input("latents", Heat)
        self.add_output("picture", Image)

    def load(self, device: str, dtype: torch.dtype) -> None:
        """It has no weights."""

    def execute(self, latents: Tensor) -> dict[str, object]:
        return {"picture": (latents * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)}


with Workflow(name="loop") as workflow:
    image = workflow.add_input("image", Image)
    num_steps = workflow.add_input("num_steps", int)
    spread = Spread()
    latents = Encode()(image)
    for step in steps(num_steps):
        latents = spread(latents, step)
    workflow.add_output(Decode()(latents), name="picture")

"""Two models in a row: one class with two settings, which workers load as two."""

from __future__ import annotations

import torch
from torch import Tensor

from entrypoints.workflows import Image, Model, Workflow


class Tone(Model):
    """Raises a picture's brightness to a power."""

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_output("image", Image)

    def load(self, device: str, dtype: torch.dtype) -> None:
        levels = torch.arange(256, dtype=torch.float64) / 255
        self.curve = (levels ** float(self.settings["power"]) * 255).round().to(torch.uint8).to(device)

    def execute(self, image: Tensor) -> dict[str, object]:
        return {"image": self.curve[image.int()]}


with Workflow(name="two_models") as workflow:
    image = workflow.add_input("image", Image)
    lighter = Tone(power=0.5)(image)
    workflow.add_output(Tone(power=3.0)(lighter), name="picture")

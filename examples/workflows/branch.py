"""A model whose output chooses the branch: dark pictures are lightened, the others stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from entrypoints.workflows import Image, Model, Workflow, choose, text


class Judge(Model):
    """Says whether a picture is dark."""

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_output("verdict", text(8))

    def load(self, device: str, dtype: torch.dtype) -> None:
        """It has no weights."""

    def execute(self, image: Tensor) -> dict[str, object]:
        return {"verdict": "dark" if image.float().mean() < 100 else "fine"}


class Lighten(Model):
    """Halves the distance to white."""

    def setup_io(self) -> None:
        self.add_input("image", Image)
        self.add_output("image", Image)

    def load(self, device: str, dtype: torch.dtype) -> None:
        """It has no weights."""

    def execute(self, image: Tensor) -> dict[str, object]:
        return {"image": 255 - (255 - image) // 2}


with Workflow(name="branch") as workflow:
    image = workflow.add_input("image", Image)
    lighten = Lighten()
    picture = choose(Judge()(image), dark=lambda: lighten(image), fine=lambda: image)
    workflow.add_output(picture, name="picture")

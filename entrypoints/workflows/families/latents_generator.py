"""LatentsGenerator: the latents that denoising begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from core.graph.op import Port
from entrypoints.workflows.data_type import Image
from entrypoints.workflows.families.family_model import OF_ENGINE, FamilyModel
from entrypoints.workflows.request_fields import SEED


class LatentsGenerator(FamilyModel):
    """Noise of the request's seed, over the picture that is to be edited, if there is one:
    `latents = latents_generator(seed, image, mask)`.
    """

    op = "image_encode"
    fields: ClassVar[Mapping[str, Port]] = {
        "seed": SEED,
        "image": Port("template", "picture"),
        "mask": Port("mask", "mask"),
    }

    def setup_io(self) -> None:
        self.add_input("seed", int)
        self.add_input("image", Image, required=False)
        self.add_input("mask", Image, required=False)
        self.add_output("latents", OF_ENGINE)

"""LatentsGenerator: the latents that denoising begins with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from core.graph.op import Port
from core.graph.workflow import Edge, Region
from entrypoints.workflows.begin import Begin
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.data_type import Image
from entrypoints.workflows.families.family_model import LARGER, OF_ENGINE, FamilyModel, canvas_of, failure
from entrypoints.workflows.lowered import Lowered
from entrypoints.workflows.request_fields import HIRES_SCALE, HIRES_STRENGTH, REFINER_START, SEED, STRENGTH


class LatentsGenerator(FamilyModel):
    """Noise of the request's seed, over the picture that is to be edited, if there is one:
    `latents = latents_generator(seed, image, mask)`. Every loop of denoising steps begins with its own:

        latents_generator(seed, image, mask, scale=scale)  # a picture so many times smaller
        latents_generator(seed, image, mask, latents=larger, strength=strength)  # these latents under new noise
        latents_generator(seed, image, mask, denoising_end=share)  # the noise levels from the highest to there
        refiners_generator(seed, image, mask, latents=latents, denoising_start=share)  # these latents from there on

    `strength`, `denoising_end` and `denoising_start` are those of diffusers' pipelines. They are what the request says:
    its `hires_scale`, its `hires_strength` (of a loop without `latents` its `strength`), and its `refiner_start`.
    """

    op = "image_encode"
    part = "_vae"
    fields: ClassVar[Mapping[str, Port]] = {
        "seed": SEED,
        "image": Port("template", "picture"),
        "mask": Port("mask", "mask"),
        "scale": HIRES_SCALE,
        "strength": STRENGTH,
        "denoising_end": REFINER_START,
        "denoising_start": REFINER_START,
    }

    def setup_io(self) -> None:
        self.add_input("seed", int)
        self.add_input("image", Image, required=False)
        self.add_input("mask", Image, required=False)
        self.add_input("latents", OF_ENGINE, required=False)
        self.add_input("scale", float, required=False)
        self.add_input("strength", float, required=False)
        self.add_input("denoising_end", float, required=False)
        self.add_input("denoising_start", float, required=False)
        self.add_output("latents", OF_ENGINE)

    def lower(self, connected: Connected) -> Lowered:
        """With how its loop begins. Raises WorkflowError."""
        lowered, given, latents = super().lower(connected), connected.given, _latents(connected)
        goes_on = latents if "denoising_start" in given else None
        strength = STRENGTH if latents is None or goes_on is not None else HIRES_STRENGTH
        if "denoising_start" in given and latents is None:
            raise failure(connected, "latents", "denoising_start is for latents to go on with; give them")
        if goes_on is not None and "strength" in given:
            raise failure(connected, "strength", "it is that of the steps before; leave it out")
        steps = Region(
            "",
            strength.name,
            begin=REFINER_START.name if goes_on is not None else 0.0,
            end=REFINER_START.name if "denoising_end" in given else 1.0,
        )
        own = {"strength": strength} if "strength" in given else {}
        return replace(lowered, fields={**lowered.fields, **own}, begin=Begin(steps, goes_on))

    def canvas(self, connected: Connected) -> str:
        """That of latents to go on with, or the one that `scale` says. Raises WorkflowError."""
        canvas = canvas_of(connected, "latents")
        if "scale" in connected.given:
            if _latents(connected) is not None:
                raise failure(connected, "scale", "the latents have a size already; leave it out")
            return HIRES_SCALE.name
        if canvas and "denoising_start" not in connected.given:
            raise failure(connected, "latents", f"they are of a smaller picture; {LARGER}")
        return canvas

    def edges(self, connected: Connected) -> Iterator[Edge]:
        """Latents to go on with are read by the loop's first step itself."""
        if "denoising_start" not in connected.given:
            yield from (replace(edge, port="start") for edge in connected.edges)


def _latents(connected: Connected) -> Edge | None:
    """`latents` is the one input that another node makes."""
    return next(iter(connected.edges), None)

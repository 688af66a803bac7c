"""LatentsGenerator: the latents that denoising begins with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from core.graph.op import Port
from core.graph.workflow import Edge, Region
from core.sampling_params import MAX_SEED
from entrypoints.workflows.begin import Begin
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.data_type import Image
from entrypoints.workflows.families.family_model import (
    LARGER,
    OF_ENGINE,
    FamilyModel,
    canvas_of,
    failure,
    scaled_canvas,
)
from entrypoints.workflows.lowered import Lowered
from entrypoints.workflows.request_fields import HIRES_SCALE, HIRES_STRENGTH, REFINER_START, SEED, STRENGTH

_SWITCHES = ("starts_over", "noise_first")


class LatentsGenerator(FamilyModel):
    """Noise of the request's seed, over the picture that is to be edited, if there is one:
    `latents = latents_generator(seed, image, mask)`. Every loop of denoising steps begins with its own:

        latents_generator(seed, image, mask, scale=scale)  # a picture so many times smaller
        latents_generator(seed, image, mask, latents=larger, strength=strength)  # these latents under new noise
        latents_generator(seed, image, mask, denoising_end=share)  # the noise levels from the highest to there
        refiners_generator(seed, image, mask, latents=latents, denoising_start=share)  # these latents from there on

    `strength`, `denoising_end` and `denoising_start` are those of diffusers' pipelines. They are what the request says:
    its `hires_scale`, its `hires_strength` (of a loop without `latents` its `strength`), and its `refiner_start`; or
    numbers, as the seed of a loop with `latents` may be. Of a strength that is a number, a step that it covers in part
    is run in every family. As with ComfyUI's samplers, the noise is over the picture or the latents at full strength,
    too, with `starts_over=True` (otherwise there is noise alone), and with `noise_first=True` it is the first that the
    seed draws (otherwise what the VAE samples of the picture comes before, as in diffusers' inpainting pipelines).
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
    plain = ("seed", "scale", "strength", "denoising_end", "denoising_start", *_SWITCHES)

    def setup_io(self) -> None:
        self.add_input("seed", int)
        self.add_input("image", Image, required=False)
        self.add_input("mask", Image, required=False)
        self.add_input("latents", OF_ENGINE, required=False)
        self.add_input("scale", float, required=False)
        self.add_input("strength", float, required=False)
        self.add_input("denoising_end", float, required=False)
        self.add_input("denoising_start", float, required=False)
        for name in _SWITCHES:
            self.add_input(name, bool, required=False)
        self.add_output("latents", OF_ENGINE)

    def lower(self, connected: Connected) -> Lowered:
        """With how its loop begins. Raises WorkflowError."""
        lowered, latents = super().lower(connected), _latents(connected)
        goes_on = latents if _has(connected, "denoising_start") else None
        strength = STRENGTH if latents is None or goes_on is not None else HIRES_STRENGTH
        if _has(connected, "denoising_start") and latents is None:
            raise failure(connected, "latents", "denoising_start is for latents to go on with; give them")
        if goes_on is not None and _has(connected, "strength"):
            raise failure(connected, "strength", "it is that of the steps before; leave it out")
        steps = Region(
            "",
            _share(connected, "strength", strength.name),
            begin=_share(connected, "denoising_start", REFINER_START.name) if goes_on is not None else 0.0,
            end=_share(connected, "denoising_end", REFINER_START.name) if _has(connected, "denoising_end") else 1.0,
        )
        own = {"strength": strength} if "strength" in connected.given else {}
        is_own = latents is not None and goes_on is None
        literals = {**lowered.node.literals, **_seed(connected), **_switches(connected)}
        node = replace(lowered.node, literals=literals)
        return replace(lowered, node=node, fields={**lowered.fields, **own}, begin=Begin(steps, goes_on, is_own))

    def canvas(self, connected: Connected) -> str:
        """That of latents to go on with, or the one that `scale` says. Raises WorkflowError."""
        canvas = canvas_of(connected, "latents")
        if _has(connected, "scale"):
            if _latents(connected) is not None:
                raise failure(connected, "scale", "the latents have a size already; leave it out")
            return scaled_canvas(connected)
        if canvas and not _has(connected, "denoising_start"):
            raise failure(connected, "latents", f"they are of a smaller picture; {LARGER}")
        return canvas

    def edges(self, connected: Connected) -> Iterator[Edge]:
        """Latents to go on with are read by the loop's first step itself."""
        if not _has(connected, "denoising_start"):
            yield from (replace(edge, port="start") for edge in connected.edges)


def _has(connected: Connected, name: str) -> bool:
    return name in connected.given or name in connected.literals


def _share(connected: Connected, name: str, field: str) -> str | float:
    """A share of the noise schedule: a number, or the field that says it. Raises WorkflowError for no share."""
    value = connected.literals.get(name, field)
    if isinstance(value, str) and value == field:
        return field
    if isinstance(value, bool | str) or not 0 < value <= 1:
        raise failure(connected, name, f"it is {value!r:.80}; give a number above 0 and at most 1")
    return float(value)


def _seed(connected: Connected) -> dict[str, int]:
    """The seed that all requests have. Raises WorkflowError for the first loop's, and for no seed."""
    if (seed := connected.literals.get("seed")) is None:
        return {}
    if _latents(connected) is None:
        raise failure(connected, "seed", "requests say the seed of a loop without latents; give an input")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= MAX_SEED:
        raise failure(connected, "seed", f"it is {seed!r:.80}; give a number from 0 to {MAX_SEED}")
    return {"seed": seed}


def _switches(connected: Connected) -> dict[str, bool]:
    """Those that are on. Raises WorkflowError."""
    values = {name: connected.literals[name] for name in _SWITCHES if name in connected.literals}
    for name, value in values.items():
        if not isinstance(value, bool):
            raise failure(connected, name, f"it is {value!r:.80}; give True, or leave it out")
    return {name: True for name, value in values.items() if value}


def _latents(connected: Connected) -> Edge | None:
    """`latents` is the one input that another node makes."""
    return next(iter(connected.edges), None)

"""Requests in two halves: the Edit decides the picture, the Delivery only how it is requested and sent."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.load import pictures
from benchmarks.load.pictures import Pixels, encode
from benchmarks.load.workload import prompt

Value = str | int | float | bool
Way = Literal["form", "stream", "json"]
OutputFormat = Literal["png", "webp", "jpeg"]
MaskShape = Literal["small", "wide", "disc", "two", "most", "all"]
Area = npt.NDArray[np.bool_]  # [height, width], True = edit

SIZES = ((256, 256), (128, 128), (192, 304), (250, 187), (320, 208), (160, 160))  # px: width, height
NUM_TEMPLATES = 8
FIRST_FRESH_TEMPLATE = 1000
SHAPES: tuple[MaskShape, ...] = ("small", "small", "wide", "disc", "two", "most", "all")
CANVASES = ("128x128", "192x128", "160x208")
HASTY_SECONDS = 0.05
"""A timeout that most edits miss; clients that use it do not retry."""
LOSSY: tuple[OutputFormat, ...] = ("jpeg",)

_EXTRAS: tuple[tuple[tuple[str, Value], ...], ...] = (
    (),
    (),
    (("mask_aware", False),),
    (("mask_margin", 24),),
    (("full_steps", 2),),
    (("strength", 0.7),),
    (("size", "144x176"),),
)
"""Further fields of the catalogue's edits, in turn."""


@dataclass(frozen=True)
class Edit:
    """All that a picture depends on. template: its number; None: a generation. extras: further fields, by name.
    partial_images: requested when it is streamed.
    """

    name: str
    template: int | None
    shape: MaskShape
    prompt: str
    seed: int
    steps: int
    n: int = 1
    extras: tuple[tuple[str, Value], ...] = ()
    partial_images: int = 0
    model: str = ""  # "": the server's first

    @property
    def fields(self) -> dict[str, Value]:
        """The request's fields except for pictures."""
        fields: dict[str, Value] = {"prompt": self.prompt, "n": self.n, "seed": self.seed}
        fields |= {"model": self.model} if self.model else {}
        return fields | {"num_inference_steps": self.steps, **dict(self.extras)}

    @property
    def num_previews(self) -> int:
        """Partial images of each image of its stream."""
        return min(self.partial_images, self.steps - 1)

    @property
    def inside(self) -> Area | None:
        """Where it edits; None for a generation."""
        if self.template is None:
            return None
        height, width, _ = template(self.template).shape
        return area(self.shape, width, height)


@dataclass(frozen=True)
class Delivery:
    """How an edit is sent. by_id: with its template's id instead of the picture. timeout: seconds."""

    way: Way = "form"
    by_id: bool = False
    white_mask: bool = False
    output_format: OutputFormat = "png"
    priority: int = 0
    timeout: float | None = None

    @property
    def fields(self) -> dict[str, Value]:
        """Fields that change no pixel; webp is lossless."""
        fields: dict[str, Value] = {"output_format": self.output_format}
        fields |= {"priority": self.priority} if self.priority else {}
        return fields | ({"timeout": self.timeout} if self.timeout is not None else {})

    @property
    def is_hasty(self) -> bool:
        return self.timeout is not None and self.timeout <= HASTY_SECONDS


PLAIN = Delivery()


def catalogue(models: Sequence[str] = ("",)) -> tuple[Edit, ...]:
    """The edits that are repeated, the same in every run. models: whose turn it is, by the edit's number."""
    random = np.random.default_rng(5)
    edits = [_edit(number, random) for number in range(26)]
    edits += [*map(_generation, range(4)), *map(_long, range(4))]
    return tuple(replace(edit, model=models[number % len(models)]) for number, edit in enumerate(edits))


def fresh(number: int) -> Edit:
    """An edit of a new template."""
    shape, steps = SHAPES[number % len(SHAPES)], (4, 6, 8)[number % 3]
    return Edit(f"fresh-{number}", FIRST_FRESH_TEMPLATE + number, shape, prompt(number), number, steps)


def _edit(number: int, random: np.random.Generator) -> Edit:
    return Edit(
        name=f"edit-{number}",
        template=number % NUM_TEMPLATES,
        shape=SHAPES[int(random.integers(len(SHAPES)))],
        prompt=prompt(number),
        seed=int(random.integers(2**31)),
        steps=(4, 8, 8, 16, 28)[int(random.integers(5))],
        n=1 if number % 6 else 1 + number // 6 % 3,
        extras=_EXTRAS[number % len(_EXTRAS)],
        partial_images=2 if number % 5 == 3 else 0,
    )


def _generation(number: int) -> Edit:
    size: tuple[tuple[str, Value], ...] = (("size", CANVASES[number % len(CANVASES)]),)
    n = 2 if number == 1 else 1
    return Edit(f"generation-{number}", None, "all", prompt(number), 100 + number, 6, n, size, 1 if number == 2 else 0)


def _long(number: int) -> Edit:
    """One that is under way when a process dies, more often than not."""
    extras: tuple[tuple[str, Value], ...] = (("mask_aware", False),) if number % 2 else ()
    return Edit(f"long-{number}", number, SHAPES[number], prompt(number), 200 + number, 100, extras=extras)


@lru_cache(64)
def template(number: int) -> Pixels:
    """Template `number` >= 0, of one of SIZES, each with its own content. uint8 [height, width, 3]."""
    return pictures.template(number, SIZES[number % len(SIZES)])


@lru_cache(64)
def template_file(number: int) -> bytes:
    """The same as a PNG."""
    return encode(template(number))


def area(shape: MaskShape, width: int, height: int) -> Area:
    """Where a mask of this shape edits."""
    y, x = np.mgrid[0:height, 0:width]
    y, x = y / height, x / width
    inside = {
        "small": (abs(x - 0.4) < 0.1) & (abs(y - 0.6) < 0.12),
        "wide": (abs(x - 0.5) < 0.45) & (abs(y - 0.3) < 0.1),
        "disc": (x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.06,
        "two": ((x < 0.2) & (y < 0.2)) | ((x > 0.7) & (y > 0.7)),
        "most": (x > 0.12) & (y > 0.12),
        "all": x >= 0,
    }
    return np.asarray(inside[shape], np.bool_)


def transparent_mask(inside: Area) -> bytes:
    """The file for the field `mask`: a PNG, transparent where to edit."""
    alpha = np.where(inside, 0, 255).astype(np.uint8)
    return encode(np.dstack([np.zeros((*inside.shape, 3), np.uint8), alpha]))


def white_mask(inside: Area) -> bytes:
    """The file for the field `mask_image`: a grey PNG, white where to edit."""
    return encode(np.where(inside, 255, 0).astype(np.uint8))


def decode(data: bytes) -> Pixels:
    """The pixels of a picture file. Raises OSError for an invalid or incomplete one."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))

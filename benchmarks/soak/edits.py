"""What is asked for, in two halves: the Edit decides the picture, the Delivery only how it is asked for and sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from benchmarks.load.workload import PROMPTS
from benchmarks.soak.pictures import Area, MaskShape, area, template

Value = str | int | float | bool
Way = Literal["openai", "stream", "json"]
OutputFormat = Literal["png", "webp", "jpeg"]

NUM_TEMPLATES = 8
FIRST_FRESH_TEMPLATE = 1000
SHAPES: tuple[MaskShape, ...] = ("small", "small", "wide", "disc", "two", "most", "all")
CANVASES = ("128x128", "192x128", "160x208")
HASTY_SECONDS = 0.05
"""A timeout that most edits miss. Who is in such a hurry does not come back."""
LOSSY: tuple[OutputFormat, ...] = ("jpeg",)


@dataclass(frozen=True)
class Edit:
    """All that a picture depends on. template: its number; None: a generation. extras: further fields, by name.
    partial_images: previews that a stream of it shows.
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

    @property
    def fields(self) -> dict[str, Value]:
        """The request's fields, but for prompt, pictures, size and n."""
        return {"seed": self.seed, "num_inference_steps": self.steps, **dict(self.extras)}

    @property
    def num_previews(self) -> int:
        """Partial images of each image of its stream."""
        return min(self.partial_images, self.steps - 1)

    @property
    def inside(self) -> Area | None:
        """What its mask leaves open; None for a generation."""
        if self.template is None:
            return None
        height, width, _ = template(self.template).shape
        return area(self.shape, width, height)


@dataclass(frozen=True)
class Delivery:
    """How an edit travels. by_id: its template is named, not sent. timeout: seconds."""

    way: Way = "openai"
    by_id: bool = False
    white_mask: bool = False
    output_format: OutputFormat = "png"
    priority: int = 0
    timeout: float | None = None

    @property
    def fields(self) -> dict[str, Value]:
        """Fields that change no pixel; webp is lossless."""
        fields: dict[str, Value] = {"priority": self.priority} if self.priority else {}
        return fields | ({"timeout": self.timeout} if self.timeout is not None else {})

    @property
    def is_hasty(self) -> bool:
        return self.timeout is not None and self.timeout <= HASTY_SECONDS


PLAIN = Delivery()


@lru_cache(1)
def catalogue() -> tuple[Edit, ...]:
    """The edits that are asked for again and again, the same in every run."""
    random = np.random.default_rng(5)
    return (*(_edit(number, random) for number in range(26)), *(_generation(number) for number in range(4)))


def fresh(number: int) -> Edit:
    """An edit of a template that nobody has seen yet."""
    steps = (4, 6, 8)[number % 3]
    shape = SHAPES[number % len(SHAPES)]
    template = FIRST_FRESH_TEMPLATE + number
    return Edit(f"fresh-{number}", template, shape, PROMPTS[number % len(PROMPTS)], number, steps)


def _edit(number: int, random: np.random.Generator) -> Edit:
    extras = _extras(number)
    return Edit(
        name=f"edit-{number}",
        template=number % NUM_TEMPLATES,
        shape=SHAPES[int(random.integers(len(SHAPES)))],
        prompt=PROMPTS[number % len(PROMPTS)],
        seed=int(random.integers(2**31)),
        steps=(4, 8, 8, 16, 28)[int(random.integers(5))],
        n=1 if number % 6 else 1 + number // 6 % 3,
        extras=extras,
        partial_images=2 if number % 5 == 3 else 0,
    )


def _extras(number: int) -> tuple[tuple[str, Value], ...]:
    choices: tuple[tuple[tuple[str, Value], ...], ...] = (
        (),
        (),
        (("mask_aware", False),),
        (("mask_margin", 24),),
        (("full_steps", 2),),
        (("strength", 0.7),),
        (("size", "144x176"),),
    )
    return choices[number % len(choices)]


def _generation(number: int) -> Edit:
    size: tuple[tuple[str, Value], ...] = (("size", CANVASES[number % len(CANVASES)]),)
    n = 2 if number == 1 else 1
    return Edit(f"generation-{number}", None, "all", PROMPTS[number], 100 + number, 6, n, size, 1 if number == 2 else 0)

"""Datasets: edits ready to be sent, drawn at random, read from a folder of pictures, or from a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from benchmarks.load import draws
from benchmarks.load.pictures import Size, alpha_mask, box, encode, template
from benchmarks.load.workload import IMAGE, MASK, prompt

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class EditCall:
    """One edit as it will be sent. image, mask: files; the mask is transparent where it edits; without image it is a
    generation. area: share of the picture under the mask; None: not known. slo_ms: of this edit alone.
    """

    prompt: str
    steps: int
    seed: int
    image: bytes | None
    mask: bytes | None
    area: float | None
    slo_ms: float | None = None
    model: str | None = None


@dataclass(frozen=True)
class Mix:
    """The distributions of edits, as texts of the command line (`draws`). num_templates: of a Zipf law. first_template:
    number of the first one; runs with other numbers share no cached pages.
    """

    mask_ratio_dist: str = "public"
    template_reuse: str = "zipf:1.05"
    num_templates: int = 60
    num_inference_steps: str = "8"
    sizes: str = "256x256"
    first_template: int = 0


class TraceLine(msgspec.Struct, frozen=True):
    """A JSON line of a trace file; missing fields are drawn. size: `WxH`. mask_ratio: area under the mask."""

    prompt: str | None = None
    template: int | None = None
    mask_ratio: float | None = None
    num_inference_steps: int | None = None
    size: str | None = None
    slo_ms: float | None = None


def example(first: int, number: int, steps: int) -> list[EditCall]:
    """Edits of the example picture under its own mask, of mask ratio 0.25. first: their first seed."""
    image, mask = IMAGE.read_bytes(), MASK.read_bytes()
    return [EditCall(prompt(seed), steps, seed, image, mask, None) for seed in range(first, first + number)]


def synthetic(mix: Mix, number: int, random: np.random.Generator) -> list[EditCall]:
    """Edits of the example picture in many contents, under boxes. Raises ValueError."""
    return from_trace(mix, [TraceLine()] * number, random)


def generations(mix: Mix, number: int, random: np.random.Generator) -> list[EditCall]:
    """New pictures, of which the mix gives the steps. Raises ValueError."""
    steps = draws.step_counts(mix.num_inference_steps)(random, number).tolist()
    return [EditCall(prompt(seed), steps[seed], seed, None, None, None) for seed in range(number)]


def from_trace(mix: Mix, lines: Sequence[TraceLine], random: np.random.Generator) -> list[EditCall]:
    """One edit a line. Raises ValueError."""
    number, choices = len(lines), draws.sizes(mix.sizes)
    areas = draws.mask_areas(mix.mask_ratio_dist)(random, number).tolist()
    templates = draws.templates(mix.template_reuse, mix.num_templates)(random, number).tolist()
    steps = draws.step_counts(mix.num_inference_steps)(random, number).tolist()
    sizes = [choices[place] for place in random.integers(len(choices), size=number)]
    calls = []
    for seed, line in enumerate(lines):
        area = areas[seed] if line.mask_ratio is None else line.mask_ratio
        size = sizes[seed] if line.size is None else draws.size(line.size)
        which = mix.first_template + (templates[seed] if line.template is None else line.template)
        calls.append(
            EditCall(
                prompt=line.prompt or prompt(seed),
                steps=line.num_inference_steps or steps[seed],
                seed=seed,
                image=_template_file(which, size),
                mask=encode(alpha_mask(box(area, size, random), size)),
                area=area,
                slo_ms=line.slo_ms,
            )
        )
    return calls


def read_trace(path: Path, number: int) -> list[TraceLine]:
    """The first `number` lines. Raises ValueError, also where there are fewer."""
    lines = [msgspec.json.decode(line, type=TraceLine) for line in path.read_text().splitlines() if line.strip()]
    if len(lines) < number:
        raise ValueError(f"{path} has {len(lines)} edits, {number} are asked for")
    return lines[:number]


def from_folder(mix: Mix, folder: Path, number: int, random: np.random.Generator) -> list[EditCall]:
    """Pictures of a folder, reused as `mix` says. `a_mask.png` (transparent = edit; else a box is drawn) and `a.txt`, a
    prompt, belong to `a.jpg`. Raises ValueError.
    """
    found = sorted(path for path in folder.iterdir() if _is_picture(path))
    if not found:
        raise ValueError(f"{folder} holds no picture ({', '.join(IMAGE_SUFFIXES)})")
    areas = draws.mask_areas(mix.mask_ratio_dist)(random, number).tolist()
    chosen = draws.templates(mix.template_reuse, len(found))(random, number).tolist()
    steps = draws.step_counts(mix.num_inference_steps)(random, number).tolist()
    return [
        EditCall(
            prompt=_prompt(found[which % len(found)], seed),
            steps=steps[seed],
            seed=seed,
            image=found[which % len(found)].read_bytes(),
            **_mask(found[which % len(found)], areas[seed], random),
        )
        for seed, which in enumerate(chosen)
    ]


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.stem.endswith("_mask")


def _prompt(path: Path, seed: int) -> str:
    words = path.with_suffix(".txt")
    return words.read_text().strip() if words.exists() else prompt(seed)


def _mask(path: Path, area: float, random: np.random.Generator) -> dict[str, Any]:
    own = path.with_name(f"{path.stem}_mask.png")
    if own.exists():
        return {"mask": own.read_bytes(), "area": None}
    size = _size_of(path)
    return {"mask": encode(alpha_mask(box(area, size, random), size)), "area": area}


def _size_of(path: Path) -> Size:
    with Image.open(path) as image:
        width, height = image.size
    return width, height


@lru_cache(maxsize=256)
def _template_file(number: int, size: Size) -> bytes:
    return encode(template(number, size))

"""Pictures and masks that benchmarks upload: the example in many contents, and boxes of a wanted area."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.load.workload import IMAGE

Pixels = npt.NDArray[np.uint8]
Size = tuple[int, int]
"""Width and height in pixels."""

ASPECTS = (0.6, 1.6)  # of a box's height to its width, relative to the picture's


def template(number: int, size: Size) -> Pixels:
    """The example picture at this size, moved right and down: another content for each number below width * height.
    uint8 [height, width, 3].
    """
    width, _ = size
    moved = np.roll(_example(size), (number // width, number % width), axis=(0, 1))
    return moved


@cache
def _example(size: Size) -> Pixels:
    with Image.open(IMAGE) as image:
        resized = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
        pixels: Pixels = np.array(resized)
    return pixels


def photo(size: Size, seed: int) -> Pixels:
    """Smooth colours with the noise of a sensor. uint8 [height, width, 3]."""
    random = np.random.default_rng(seed)
    smooth = Image.fromarray(random.integers(0, 256, (6, 8, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth, np.int16) + random.integers(-6, 7, (size[1], size[0], 3), np.int16)
    pixels: Pixels = noisy.clip(0, 255).astype(np.uint8)
    return pixels


def middle_box(share: float, size: Size) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a box in the middle, of the picture's shape, that takes this share of it."""
    columns, rows = (round(side * share**0.5) for side in size)
    left, top = (size[0] - columns) // 2, (size[1] - rows) // 2
    return left, top, left + columns, top + rows


def box(area: float, size: Size, random: np.random.Generator) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a box that takes this share of the picture, of random shape and place."""
    width, height = size
    low, high = max(ASPECTS[0], area), min(ASPECTS[1], 1 / area)  # neither side exceeds the picture's
    aspect = random.uniform(min(low, high), high)
    columns = min(width, max(1, round(width * (area / aspect) ** 0.5)))
    rows = min(height, max(1, round(height * (area * aspect) ** 0.5)))
    left, top = int(random.integers(width - columns + 1)), int(random.integers(height - rows + 1))
    return left, top, left + columns, top + rows


def alpha_mask(place: tuple[int, int, int, int], size: Size) -> Pixels:
    """Transparent within the box, as OpenAI's masks are where they edit. uint8 [height, width, 4]."""
    left, top, right, bottom = place
    mask = np.zeros((size[1], size[0], 4), np.uint8)
    mask[..., 3] = 255
    mask[top:bottom, left:right, 3] = 0
    return mask


def encode(pixels: Pixels, kind: str = "png", **options: Any) -> bytes:
    """The file. PNGs are compressed as lightly as a client in a hurry would."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind.upper(), **({"compress_level": 1} if kind == "png" else {}) | options)
    return file.getvalue()

"""Pictures and masks of any number, as arrays and as the files that clients send."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.load.workload import IMAGE

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]
Area = npt.NDArray[np.bool_]  # [height, width], True = edit
MaskShape = Literal["small", "wide", "disc", "two", "most", "all"]

SIZES = ((256, 256), (128, 128), (192, 304), (250, 187), (320, 208), (160, 160))  # px: width, height


@lru_cache(64)
def template(number: int) -> Pixels:
    """Template `number`, 0 and up: the example picture, moved about and of one of SIZES; each its own content."""
    with Image.open(IMAGE) as image:
        whole = np.asarray(image.convert("RGB"))
    moved = np.roll(whole, (number // whole.shape[1], number % whole.shape[1]), (0, 1))
    return np.asarray(Image.fromarray(moved).resize(SIZES[number % len(SIZES)], Image.Resampling.BICUBIC))


@lru_cache(64)
def template_file(number: int) -> bytes:
    """The same as a PNG."""
    return _png(Image.fromarray(template(number)))


def area(shape: MaskShape, width: int, height: int) -> Area:
    """What a mask of this shape leaves open."""
    y, x = np.mgrid[0:height, 0:width]
    y, x = y / height, x / width
    match shape:
        case "small":
            inside = (abs(x - 0.4) < 0.1) & (abs(y - 0.6) < 0.12)
        case "wide":
            inside = (abs(x - 0.5) < 0.45) & (abs(y - 0.3) < 0.1)
        case "disc":
            inside = (x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.06
        case "two":
            inside = ((x < 0.2) & (y < 0.2)) | ((x > 0.7) & (y > 0.7))
        case "most":
            inside = (x > 0.12) & (y > 0.12)
        case "all":
            inside = x >= 0
    return np.asarray(inside, np.bool_)


def transparent_mask(inside: Area) -> bytes:
    """The file for the field `mask`: a PNG, transparent where to edit."""
    image = Image.new("RGBA", inside.shape[::-1])
    image.putalpha(Image.fromarray(np.where(inside, 0, 255).astype(np.uint8)))
    return _png(image)


def white_mask(inside: Area) -> bytes:
    """The file for the field `mask_image`: a grey PNG, white where to edit."""
    return _png(Image.fromarray(np.where(inside, 255, 0).astype(np.uint8)))


def decode(data: bytes) -> Pixels:
    """The pixels of a picture file. Raises OSError for what is none, or not a whole one."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()

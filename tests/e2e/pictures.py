"""Encoded pictures and masks, as clients send them."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
BOX = (slice(20, 60), slice(30, 70))  # rows, columns


def photo(width: int = 96, height: int = 80, seed: int = 0) -> Pixels:
    """A smooth random picture, uint8 [height, width, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def encode(pixels: Pixels, file_format: str = "png") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format)
    return file.getvalue()


def decode(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)))


def alpha_mask(width: int = 96, height: int = 80) -> bytes:
    """A mask in OpenAI's convention: a PNG whose transparent box is to be edited."""
    pixels = np.full((height, width, 4), 255, np.uint8)
    pixels[(*BOX, 3)] = 0
    return encode(pixels)


def white_mask(width: int = 96, height: int = 80) -> bytes:
    """A mask in diffusers' convention: a grey PNG whose white box is to be edited."""
    pixels = np.zeros((height, width), np.uint8)
    pixels[BOX] = 255
    return encode(pixels)

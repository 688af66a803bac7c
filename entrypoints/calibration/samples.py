"""Builds the edits that a calibration compares, from the user's images and prompts; without a mask file, with a random
box as the mask.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from core.errors import ConfigError
from core.model_info import ModelInfo
from engine.images.image_ops import generation_size
from entrypoints.image_engine import Edit
from entrypoints.pictures import upright

SUFFIXES = frozenset({".png", ".webp", ".jpg", ".jpeg"})
MASK_ENDING = "_mask"
SMALLEST_BOX, LARGEST_BOX = 0.03, 0.5
"""Bounds on the share of the picture's area that a random box covers, before rounding and clipping."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sample:
    """One edit. image: RGB at generation size. mask: bool [height, width], true = edit."""

    image: Image.Image
    mask: Mask
    prompt: str
    seed: int

    def as_edit(self) -> Edit:
        return Edit(prompt=self.prompt, image=self.image, mask_image=self.mask.astype(np.uint8) * 255)


def find_images(folder: Path) -> list[Path]:
    """The folder's pictures without masks, sorted by name. Raises ConfigError if there are none."""
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}")
    pictures = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    images = [path for path in pictures if not path.stem.endswith(MASK_ENDING)]
    if not images:
        raise ConfigError(f"{folder} holds no pictures; put PNG, WebP or JPEG files there")
    return images


def make_samples(images: Sequence[Path], prompts: Sequence[str], number: int, model: ModelInfo) -> list[Sample]:
    """`number` edits that cycle through images and prompts, with seeds 0, 1, ... Raises OSError for a file that is not
    a picture, and ConfigError for a mask that has another size than its image or selects nothing.
    """
    turns = islice(zip(cycle(images), cycle(prompts), strict=False), number)
    return [_sample(path, prompt, seed, model) for seed, (path, prompt) in enumerate(turns)]


def _sample(path: Path, prompt: str, seed: int, model: ModelInfo) -> Sample:
    with Image.open(path) as file:
        picture = upright(file)
        size = generation_size(*picture.size, model.native_size, model.token_size, model.max_side)
        image = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        mask_path = path.with_name(f"{path.stem}{MASK_ENDING}.png")
        mask = _read_mask(mask_path, picture.size, size) if mask_path.is_file() else random_box(size, path.name, seed)
    return Sample(image, mask, prompt, seed)


def _read_mask(path: Path, image_size: tuple[int, int], size: tuple[int, int]) -> Mask:
    """A mask file, resized to `size`. With an alpha channel, transparent = edit; without, white = edit. image_size: of
    the image when it is upright.
    """
    with Image.open(path) as file:
        picture = upright(file)
        if picture.size != image_size:
            raise ConfigError(f"{path} is {picture.size}, its image {image_size}: give a mask of the image's size")
        has_alpha = "A" in picture.getbands()
        channel = picture.getchannel("A") if has_alpha else picture.convert("L")
        values = np.asarray(channel.resize(size, Image.Resampling.NEAREST))
    mask = values < 128 if has_alpha else values >= 128
    if not mask.any():
        raise ConfigError(f"{path} selects nothing: make what to edit transparent, or white where it has no alpha")
    return np.asarray(mask)


def random_box(size: tuple[int, int], name: str, seed: int) -> Mask:
    """A pseudorandom box that covers SMALLEST_BOX..LARGEST_BOX of the picture; equal arguments give equal boxes."""
    dice = random.Random(zlib.crc32(f"{name} {seed}".encode()))
    share, aspect = dice.uniform(SMALLEST_BOX, LARGEST_BOX), dice.uniform(0.6, 1.6)
    width, height = size
    box_width = min(width, max(1, round((share * aspect) ** 0.5 * width)))
    box_height = min(height, max(1, round((share / aspect) ** 0.5 * height)))
    left, top = dice.randint(0, width - box_width), dice.randint(0, height - box_height)
    mask = np.zeros((height, width), np.bool_)
    mask[top : top + box_height, left : left + box_width] = True
    return mask

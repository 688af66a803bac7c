"""The pictures of `image_work`: photos of 1 to 12 megapixels, noisy as a sensor's, as JPEG and PNG, and their masks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.load.pictures import Pixels, alpha_mask, encode
from benchmarks.serving.image_work_run import Arrival

MEGAPIXELS = (1, 3, 6, 12)
FORMATS: dict[str, dict[str, Any]] = {"jpeg": {"quality": 90}, "png": {"compress_level": 1}}
MASK_SHARES = (0.05, 0.1, 0.2, 0.35)
"""Of the picture, in turn; means of the paper's workloads are 0.11, 0.19 and 0.35."""


def write_uploads(folder: Path) -> None:
    """One file of every size and format, and a mask for each."""
    for number, (megapixels, kind) in enumerate(product(MEGAPIXELS, FORMATS)):
        height = round((megapixels * 1e6 * 3 / 4) ** 0.5)
        size = height * 4 // 3, height
        file = encode(_photo(size, seed=number), kind, **FORMATS[kind])
        (folder / f"{number:02}-image").write_bytes(file)
        # Shares that go round once more than sizes do, so that both formats of a size differ in theirs.
        share = MASK_SHARES[(number + number // len(MASK_SHARES)) % len(MASK_SHARES)]
        (folder / f"{number:02}-mask").write_bytes(encode(alpha_mask(_middle(size, share), size)))


class Uploads:
    """What `write_uploads` wrote, by number: the files of an image and its mask."""

    def __init__(self, folder: Path) -> None:
        self._files = list(_read_pairs(folder))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[bytes, bytes]:
        return self._files[number]

    def each_once(self) -> tuple[Arrival, ...]:
        """An edit of every picture, at once: what the model caches of them is there afterwards."""
        return tuple(Arrival(0.0, number, number) for number in range(len(self)))


def _read_pairs(folder: Path) -> Iterator[tuple[bytes, bytes]]:
    for image in sorted(folder.glob("*-image")):
        yield image.read_bytes(), image.with_name(image.name.replace("image", "mask")).read_bytes()


def _photo(size: tuple[int, int], seed: int) -> Pixels:
    """[height, width, 3]"""
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth, np.int16) + rng.integers(-6, 7, (size[1], size[0], 3), np.int16)
    photo: Pixels = noisy.clip(0, 255).astype(np.uint8)
    return photo


def _middle(size: tuple[int, int], share: float) -> tuple[int, int, int, int]:
    """A rectangle in the middle that takes `share` of the picture."""
    width, height = size
    columns, rows = (round(side * share**0.5) for side in size)
    left, top = (width - columns) // 2, (height - rows) // 2
    return left, top, left + columns, top + rows

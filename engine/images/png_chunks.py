"""Reads parts of a PNG file that Pillow does not expose: bit depth, raw chunks, low bytes of 16-bit samples.

Only for files that Pillow has opened: that checks the chunks before the pixels, and nothing is checked here.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

if TYPE_CHECKING:
    from PIL.PngImagePlugin import PngImageFile

Bytes = npt.NDArray[np.uint8]

_SIGNATURE_BYTES = 8
_PIXELS = (b"IDAT", b"fdAT", b"IEND")


def chunks_before_pixels(data: Bytes) -> Iterator[tuple[bytes, memoryview]]:
    """(type, content) of each chunk before the pixels. data: the file, uint8 [bytes]."""
    content, start = data.data, _SIGNATURE_BYTES
    while True:
        length, kind = struct.unpack_from(">I4s", content, start)
        if kind in _PIXELS:
            return
        yield kind, content[start + 8 : start + 8 + length]
        start += length + 12


def bit_depth(data: Bytes) -> int:
    """Bits per sample, or per palette index: 1, 2, 4, 8 or 16."""
    return next(content[8] for kind, content in chunks_before_pixels(data) if kind == b"IHDR")


def low_bytes(data: Bytes) -> Bytes:
    """The low bytes of a 16-bit RGB file's samples, uint8 [height, width, 3]. Pillow returns the high bytes; with its
    decoder for the other byte order (16L), these are the low ones."""
    with Image.open(io.BytesIO(data.data), formats=("PNG",)) as opened:
        file: PngImageFile = opened  # type: ignore[assignment]
        file.tile = [tile._replace(args="RGB;16L") for tile in file.tile]
        return np.asarray(file)

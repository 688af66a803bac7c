"""What of a PNG file Pillow does not hand over as it is: the bit depth, chunks by their names, low bytes of samples.

For files that Pillow has opened, and whose chunks up to the pixels it has thereby checked.
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
    """(type, content) of each chunk of a file, uint8 [bytes], up to the first with pixels."""
    content, start = data.data, _SIGNATURE_BYTES
    while True:
        length, kind = struct.unpack_from(">I4s", content, start)
        if kind in _PIXELS:
            return
        yield kind, content[start + 8 : start + 8 + length]
        start += length + 12


def bit_depth(data: Bytes) -> int:
    """Bits of a sample (1, 2, 4, 8, 16), or of an index into the palette."""
    return next(content[8] for kind, content in chunks_before_pixels(data) if kind == b"IHDR")


def low_bytes(data: Bytes) -> Bytes:
    """The low bytes of the samples of a 16-bit RGB file, uint8 [height, width, 3]; Pillow gives the high ones. Its
    decoder for the other byte order takes them for high ones."""
    with Image.open(io.BytesIO(data.data), formats=("PNG",)) as opened:
        file: PngImageFile = opened  # type: ignore[assignment]
        file.tile = [tile._replace(args="RGB;16L") for tile in file.tile]
        return np.asarray(file)

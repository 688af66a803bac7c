"""Converts pictures (PIL images, NumPy arrays, paths, bytes) to the encoded files that an engine takes, and back."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps

from core.errors import InvalidImageError, InvalidRequestError

ImageLike = Image.Image | str | Path | bytes | npt.NDArray[np.uint8]
"""A PIL image, a path, an encoded file, or an array uint8 [height, width(, 1..4)]."""

# Raised by Pillow for unusable modes, shapes and files; for an opened file only when it is saved, as decoding is lazy.
_PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    SystemError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    struct.error,
    zlib.error,
)
_DECODING = threading.Lock()
"""Held while an opened file is decoded, which Pillow does lazily, and not safely if several edits share the picture."""

_TURNED = range(2, 9)  # EXIF orientations that ask for a rotation or reflection; 1 is upright


def encode_picture(image: ImageLike, name: str) -> bytes:
    """The picture as an encoded file: bytes and files unchanged, others as a lightly compressed PNG. name: the field,
    for errors. Raises InvalidImageError, or InvalidRequestError for a file that cannot be read.
    """
    match image:
        case bytes():
            return image
        case str() | Path():
            return _read(Path(image), name)
        case np.ndarray() | Image.Image():
            return _to_png(image, name)
    raise _unusable(name, f"a {type(image).__name__} is no image")


def _to_png(image: Image.Image | npt.NDArray[np.uint8], name: str) -> bytes:
    buffer = io.BytesIO()
    try:
        picture = image if isinstance(image, Image.Image) else _from_array(image)
        with _DECODING:
            picture.load()
            orientation = _orientation(picture)
        picture.save(buffer, "PNG", compress_level=1, exif=orientation)
    except _PILLOW_ERRORS as error:
        raise _unusable(name, str(error)) from error
    return buffer.getvalue()


def _orientation(picture: Image.Image) -> Image.Exif:
    """EXIF data with only the picture's orientation, so that the engine turns an opened photo upright as it does with
    its file. Empty if there is none, or if the EXIF data cannot be parsed.
    """
    exif = Image.Exif()
    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation)
    except _PILLOW_ERRORS:
        return exif
    if isinstance(orientation, int) and orientation in _TURNED:
        exif[ExifTags.Base.Orientation] = orientation
    return exif


def _from_array(array: npt.NDArray[np.uint8]) -> Image.Image:
    if array.dtype != np.uint8:
        raise TypeError(f"the array is {array.dtype}, expected uint8")
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _unusable(name: str, why: str) -> InvalidImageError:
    message = f"Invalid '{name}': {why}. Give an RGB, RGBA or L image, or a uint8 array of [height, width(, 1..4)]."
    return InvalidImageError(message, param=name)


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequestError(f"Cannot read {str(path)!r}: {reason}.", param=name) from error


def upright(picture: Image.Image) -> Image.Image:
    """An opened picture, turned as its EXIF orientation says; unchanged if its EXIF data cannot be parsed. Raises
    OSError for a damaged file.
    """
    picture.load()
    try:
        return ImageOps.exif_transpose(picture)
    except _PILLOW_ERRORS:
        return picture


def decode_picture(data: bytes) -> Image.Image:
    """The picture in an encoded file, fully decoded."""
    image = Image.open(io.BytesIO(data))
    image.load()
    return image

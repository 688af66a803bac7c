"""Decodes uploads and encodes results (PNG, WebP, JPEG); runs in the image processors.

Uploads are untrusted: the size in the header is checked before a pixel is decoded, and any error of a decoder becomes
an InvalidImageError that names the field.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from binascii import b2a_base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

# Registers the formats: otherwise Pillow would import all of its plugins at the first WebP file.
from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401

from core.errors import EngineError, InvalidImageError, InvalidRequestError
from core.messages.image_processor import OutputFormat
from engine.images.colour import MAX_ICC_BYTES, NO_COLOUR, Colour
from engine.images.png_chunks import bit_depth, low_bytes

Bytes = npt.NDArray[np.uint8]

PngImagePlugin.MAX_TEXT_CHUNK = 16 * 1024**2
"""Bytes of a profile or a text in a PNG file, decompressed; a file with more counts as damaged. Pillow's own limit is 1
MiB, which the profiles of some printers exceed."""

FORMATS = ("PNG", "WEBP", "JPEG")
MAX_SIDE: dict[OutputFormat, int] = {"png": 2**31 - 1, "webp": 16383, "jpeg": 65500}

# Errors that Pillow's decoders raise for damaged files (found by cutting and flipping bytes of every format).
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    struct.error,
    zlib.error,
)
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """A decoded upload, upright. image: mode RGB, or RGBA if the file has transparency of any kind; 8 bits a channel.

    colour: the file's colour information. is_turned: it was rotated by 90 degrees because of its EXIF orientation, so
    its width and height differ from the file's.
    """

    image: Image.Image
    colour: Colour = NO_COLOUR
    is_turned: bool = False


# ------------------------------------------------------------------------------------------------------------ reading


def decode(data: Bytes, field: str, max_pixels: int) -> DecodedImage:
    """Decode a PNG, WebP or JPEG file (uint8 [bytes]), recognised by its content; of an animation, the first frame.
    field: of the request, that it came in.

    EXIF orientation is applied. Palettes, grey, CMYK and 16-bit files become 8-bit RGB(A), 16 bits by their high byte.
    Raises InvalidImageError (not such a file, or damaged) and InvalidRequestError (more than `max_pixels` pixels, found
    before decoding).
    """
    with _pillow_limits(max_pixels):
        try:
            with Image.open(io.BytesIO(data.data), formats=FORMATS) as file:
                check_pixels(file.size, field, max_pixels)
                file.load()
                upright = _upright(file, _to_rgb(file, data))
                return DecodedImage(upright, Colour.of(file, data), is_turned=upright.size != file.size)
        except Image.DecompressionBombError as error:
            raise _too_large(str(error), field) from error
        except _DECODE_ERRORS as error:
            raise unreadable(field) from error


def check_pixels(size: tuple[int, int], field: str, max_pixels: int) -> None:
    """Raise InvalidRequestError if a picture of `size` (width, height) has more than `max_pixels` pixels."""
    width, height = size
    if width * height > max_pixels:
        raise _too_large(f"{width}x{height} pixels are more than the {max_pixels} allowed", field)


def unreadable(field: str) -> InvalidImageError:
    """The error for a damaged file or one of another format, with the messages of OpenAI's images API."""
    if field in ("reference_image", "control_image"):
        kind = field.removesuffix("_image")
        message = f"Invalid {kind} image file or mode, please check your image file: PNG, WebP and JPEG are read."
        return InvalidImageError(message, param=field, code="invalid_image_file")
    if field == "image":
        message = "Invalid image file or mode for image 1, please check your image file: PNG, WebP and JPEG are read."
        return InvalidImageError(message, param=field, code="invalid_image_file")
    if field in ("mask", "mask_image"):
        message = "Invalid mask image format - not a readable PNG, WebP or JPEG file"
        return InvalidImageError(message, param=field, code="invalid_mask_image_format")
    message = f"Invalid '{field}': not a readable PNG, WebP or JPEG file."
    return InvalidImageError(message, param=field, code="invalid_image_file")


def _too_large(reason: str, field: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{field}': {reason}.", param=field, code="image_too_large")


@contextmanager
def _pillow_limits(max_pixels: int) -> Iterator[None]:
    """Set Pillow's decompression bomb check, which precedes the memory use of WebP's decoder, to `max_pixels`."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _to_rgb(file: Image.Image, data: Bytes) -> Image.Image:
    """A loaded file's pixels as RGB or RGBA, without its metadata."""
    if file.mode.startswith("I"):
        return _from_grey_16(file)
    transparent = file.info.get("transparency")
    if file.format == "PNG" and file.mode in ("L", "RGB") and transparent is not None:
        depth = bit_depth(data)
        if depth == 16:
            return _from_rgb_16(file, data, transparent)
        file.info["transparency"] = _at_8_bits(transparent, depth)
    image = file.convert("RGBA" if file.has_transparency_data else "RGB")
    image.info.clear()
    return image


def _at_8_bits(named: int | tuple[int, ...], depth: int) -> int | tuple[int, ...]:
    """A PNG file's transparent colour, converted from the file's bit depth to decoded 8-bit values. Bits above the
    depth are ignored."""
    if isinstance(named, tuple):
        return tuple(value & 255 for value in named)
    largest: int = (1 << depth) - 1
    return (named & largest) * 255 // largest


def _from_rgb_16(file: Image.Image, data: Bytes, transparent: tuple[int, ...]) -> Image.Image:
    """A 16-bit RGB PNG as RGBA; its transparent colour is compared with all 16 bits."""
    named = np.array(transparent, np.uint16)
    matches = (np.asarray(file) == named >> 8).all(axis=2) & (low_bytes(data) == named & 255).all(axis=2)
    image = file.convert("RGB")
    image.info.clear()
    image.putalpha(Image.fromarray(np.where(matches, 0, 255).astype(np.uint8)))
    return image


def _from_grey_16(file: Image.Image) -> Image.Image:
    """A 16-bit grey PNG as RGB or RGBA; its transparent colour, if any, is compared with all 16 bits."""
    values = np.asarray(file)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    transparent = file.info.get("transparency")
    if transparent is None:
        return grey.convert("RGB")
    alpha = Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8))
    return Image.merge("RGBA", (grey, grey, grey, alpha))


def _upright(file: Image.Image, image: Image.Image) -> Image.Image:
    """`image` rotated by the EXIF orientation of `file`; unchanged if the EXIF data cannot be parsed."""
    try:
        orientation = file.getexif().get(_EXIF_ORIENTATION)
    except _DECODE_ERRORS:
        return image
    transpose = _TRANSPOSES.get(orientation) if isinstance(orientation, int) else None
    return image if transpose is None else image.transpose(transpose)


# ------------------------------------------------------------------------------------------------------------ writing


def encoded_bytes(
    width: int, height: int, channels: int, base64: bool, output_format: OutputFormat | None = None
) -> int:
    """Upper bound in bytes of any picture of this size after `encode`; without a format, of the largest of the three.

    Relative to the bytes of its pixels, sides rounded up to 16: PNG noise becomes stored deflate blocks, 1.0003. WebP:
    noise takes 1.0003 lossless, 0/255 noise 1.05 lossy. JPEG: 0/255 noise at quality 100 takes 1.58, but its Huffman
    codes allow 26 bits per coefficient, 3.25, and the bound must be safe.
    """
    factor = {"png": 1.01, "webp": 1.25, "jpeg": 3.5, None: 3.5}[output_format]
    pixels = (width + 15) // 16 * 16 * ((height + 15) // 16 * 16) * channels
    # A PNG row has a filter byte; the rest is headers and a colour profile (compressed noise grows by less than 1 %).
    size = int(pixels * factor) + 2 * height + MAX_ICC_BYTES + 64 * 1024
    return (size + 2) // 3 * 4 if base64 else size


def check_output_size(width: int, height: int, output_format: OutputFormat) -> None:
    """Raise InvalidRequestError if the format cannot hold a picture of width x height pixels."""
    if max(width, height) > MAX_SIDE[output_format]:
        message = f"Invalid 'output_format': {output_format} holds at most {MAX_SIDE[output_format]} pixels a side, "
        raise InvalidRequestError(message + f"not {width}x{height}; use 'png'.", param="output_format")


def encode(
    image: Image.Image,
    output_format: OutputFormat,
    compression: int,
    colour: Colour,
    base64: bool,
    out: Bytes,
) -> int:
    """Write `image` (mode RGB or RGBA) as a file into `out`, uint8 [bytes]; returns the bytes written.

    compression: 0..100, quality of jpeg and webp; webp at 100 is lossless, colours of transparent pixels included.
    JPEG has no transparency: the image is flattened on white. colour: written as far as the format supports it. base64:
    write base64 text. Raises EngineError if `out` is too small (nothing is written outside it), InvalidRequestError if
    the format cannot hold the size.
    """
    check_output_size(*image.size, output_format)
    sink = _Sink(out, base64)
    match output_format:
        case "png":
            _write_png(image, colour, sink)
        case "webp":
            profile = colour.icc_profile or b""
            image.save(cast(IO[bytes], sink), "WEBP", icc_profile=profile, **_webp_options(compression))
        case "jpeg":
            # 4:2:0 would blur the edges of saturated edits, which a high quality is asked for to keep.
            sampling = 0 if compression >= 90 else 2
            # Pillow reads 0 as "not given".
            quality = max(1, compression)
            options = {"quality": quality, "subsampling": sampling, "icc_profile": colour.icc_profile}
            _flatten(image).save(cast(IO[bytes], sink), "JPEG", **options)
    return sink.finish()


def _webp_options(compression: int) -> dict[str, Any]:
    # Methods chosen by measurement, 12 MP on one core: lossless 0 takes 1.4 s (1: 2.8 s, a fifth smaller); lossy 1
    # takes 0.45 s (4, the default: 1.1 s, no smaller).
    if compression == 100:
        return {"lossless": True, "exact": True, "quality": 0, "method": 0}
    return {"quality": compression, "method": 1}


def _flatten(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    flat = Image.new("RGB", image.size, "white")
    flat.paste(image, mask=image.getchannel("A"))
    return flat


class _Sink(io.RawIOBase):
    """Writes a file into a fixed region, as is or as base64; raises EngineError instead of writing past its end."""

    _PIECE = 3 * 256 * 1024

    def __init__(self, out: Bytes, base64: bool) -> None:
        self._out = out.data
        self._base64 = base64
        self._written = 0
        self._rest = b""  # bytes not written yet: base64 encodes groups of three

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._base64:
            for start in range(0, len(view), self._PIECE):
                self._put_base64(self._rest + view[start : start + self._PIECE])
        else:
            self._put(view)
        return len(view)

    def finish(self) -> int:
        """Write the bytes held back; returns the total number of bytes written."""
        self._put(b2a_base64(self._rest, newline=False))
        return self._written

    def _put_base64(self, data: bytes) -> None:
        whole = len(data) - len(data) % 3
        self._put(b2a_base64(memoryview(data)[:whole], newline=False))
        self._rest = data[whole:]

    def _put(self, data: bytes | memoryview) -> None:
        end = self._written + len(data)
        if end > len(self._out):
            raise EngineError(f"an encoded image does not fit its {len(self._out)} bytes")
        self._out[self._written : end] = data
        self._written = end


# A PNG writer of our own, for speed: 12 MP of photo-like pixels with sensor noise, on one core, take Pillow 0.99 s and
# 19.9 MB at level 1, 4.3 s and 16.9 MB at level 6. Here every row is filtered by "up" and deflated with run lengths and
# Huffman codes only, in 0.36 s and 17.1 MB (without run lengths 0.31 s, but flat areas take at least one bit per byte).
# The price: drawings get larger; one of flat shapes and text takes 245 kB instead of 189. Strips bound the memory and
# fit the CPU's cache.
_STRIP_BYTES = 1024 * 1024
_UP_FILTER = 2


def _write_png(image: Image.Image, colour: Colour, sink: _Sink) -> None:
    width, height = image.size
    color_type = 6 if image.mode == "RGBA" else 2
    sink.write(b"\x89PNG\r\n\x1a\n")
    _write_chunk(sink, b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0))
    for kind, content in colour.chunks:
        _write_chunk(sink, kind, content)
    if colour.icc_profile is not None:
        _write_chunk(sink, b"iCCP", b"ICC Profile\0\0" + zlib.compress(colour.icc_profile))
    deflate = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    for filtered in _filtered_strips(image):
        if piece := deflate.compress(filtered.data):
            _write_chunk(sink, b"IDAT", piece)
    _write_chunk(sink, b"IDAT", deflate.flush())
    _write_chunk(sink, b"IEND", b"")


def _filtered_strips(image: Image.Image) -> Iterator[Bytes]:
    """Strips of rows from top to bottom, uint8 [rows, 1 + row bytes]: the filter byte, then the row less that above."""
    width, height = image.size
    row_bytes = width * len(image.getbands())
    strip_rows = max(1, _STRIP_BYTES // row_bytes)
    above = np.zeros(row_bytes, np.uint8)
    for top in range(0, height, strip_rows):
        rows = np.asarray(image.crop((0, top, width, min(top + strip_rows, height)))).reshape(-1, row_bytes)
        filtered = np.empty((len(rows), 1 + row_bytes), np.uint8)
        filtered[:, 0] = _UP_FILTER
        np.subtract(rows[0], above, out=filtered[0, 1:])
        np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
        above = rows[-1]
        yield filtered


def _write_chunk(sink: _Sink, kind: bytes, data: bytes) -> None:
    sink.write(struct.pack(">I", len(data)) + kind)
    sink.write(data)
    sink.write(struct.pack(">I", zlib.crc32(data, zlib.crc32(kind))))

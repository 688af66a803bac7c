"""Uploads to templates, masks and tokens; generated pixels to files. Exactness is checked pixel by pixel."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, PngImagePlugin

from core.errors import EngineError, InvalidImageError, InvalidRequestError
from core.handles import ArrayRef
from core.messages.image_processor import Box, CanvasScale, ComposeImage, MaskKind, OutputFormat, PrepareImages
from engine.images import image_codec, image_ops
from engine.images.colour import MAX_ICC_BYTES, Colour, PngChunk
from engine.images.generation_size import smaller_size
from engine.images.png_chunks import chunks_before_pixels

NOWHERE = ArrayRef(0, 0, (0,), "uint8")
MAX_PIXELS = 4_000_000
Bytes = npt.NDArray[np.uint8]


def noise(*shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def file_of(image: Image.Image | Bytes, kind: str = "PNG", **options: Any) -> Bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def alpha_mask(keep: Bytes) -> Bytes:
    return file_of(np.dstack([np.zeros((*keep.shape, 3), np.uint8), keep]))


def box_keep(width: int, height: int, left: int, top: int, right: int, bottom: int, value: int = 0) -> Bytes:
    keep = np.full((height, width), 255, np.uint8)
    keep[top:bottom, left:right] = value
    return keep


def first_pass(scale: float) -> CanvasScale:
    return CanvasScale("first", scale, "hires_scale")


def prepare(
    image: Bytes | None,
    mask: Bytes | None = None,
    kind: MaskKind = "alpha",
    *,
    canvas: tuple[int, int] | None = None,
    native: int = 256,
    margin: int = 0,
    max_pixels: int = MAX_PIXELS,
    padding: int | None = None,
    hires_scale: float | None = None,
) -> image_ops.PreparedArrays:
    job = PrepareImages(
        job_id=0,
        image=None if image is None else NOWHERE,
        mask=None if mask is None else NOWHERE,
        mask_kind=kind,
        canvas_size=canvas,
        mask_margin=margin,
        native_size=native,
        token_size=16,
        max_pixels=max_pixels,
        scratch=NOWHERE,
        padding_mask_crop=padding,
        scales=() if hires_scale is None else (first_pass(hires_scale),),
    )
    return image_ops.prepare(job, image, mask)


def compose_bytes(
    pixels: Bytes,
    image: Bytes | None,
    mask: Bytes | None = None,
    kind: MaskKind = "alpha",
    *,
    canvas: tuple[int, int] | None = None,
    size: tuple[int, int] | None = None,
    output_format: OutputFormat = "png",
    compression: int = 100,
    as_base64: bool = False,
    room: int = 8_000_000,
    crop: Box | None = None,
) -> tuple[bytes, tuple[int, int]]:
    job = ComposeImage(
        job_id=0,
        pixels=NOWHERE,
        image=None if image is None else NOWHERE,
        mask=None if mask is None else NOWHERE,
        mask_kind=kind,
        canvas_size=canvas,
        output_size=size,
        output_format=output_format,
        compression=compression,
        base64=as_base64,
        max_pixels=MAX_PIXELS,
        out=NOWHERE,
        crop=crop,
    )
    out = np.zeros(room, np.uint8)
    composed = image_ops.compose(job, pixels, image, mask, out)
    return out[: composed.nbytes].tobytes(), composed.size


def compose(*args: Any, **options: Any) -> Bytes:
    encoded, _ = compose_bytes(*args, **options)
    return np.asarray(Image.open(io.BytesIO(encoded)))


def blend(source: npt.NDArray[Any], generated: npt.NDArray[Any], keep: npt.NDArray[Any]) -> Bytes:
    """The specified formula, in exact decimals."""
    alpha = keep.astype(np.float64)[..., None] / 255
    return np.floor(source * alpha + generated * (1 - alpha) + 0.5 + 1e-9).astype(np.uint8)


# ------------------------------------------------------------------------------------------------------------ decoding


def decoded(data: Bytes) -> Bytes:
    return np.asarray(image_codec.decode(data, "image", MAX_PIXELS).image)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "1", "P"])
def test_png_of_every_mode_gives_the_pixels_pillow_names_for_it(mode: str) -> None:
    image = Image.fromarray(noise(21, 17, 4))
    image = (image.convert("RGB") if mode == "P" else image).convert(mode)
    expected = image.convert("RGBA" if mode in ("RGBA", "LA") else "RGB")
    assert np.array_equal(decoded(file_of(image)), np.asarray(expected))


def test_palette_transparency_becomes_alpha() -> None:
    image = Image.fromarray(noise(8, 8) % 4).convert("L")
    palette = Image.new("P", (8, 8))
    palette.frombytes(image.tobytes())
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120])
    pixels = decoded(file_of(palette, transparency=bytes([0, 128, 255, 255])))
    indices = np.asarray(palette)
    assert np.array_equal(pixels[..., 3], np.array([0, 128, 255, 255], np.uint8)[indices])
    assert np.array_equal(pixels[..., 0], np.array([10, 40, 70, 100], np.uint8)[indices])


def png_16(values: npt.NDArray[np.uint16], color_type: int, trns: bytes = b"") -> Bytes:
    """A 16-bit PNG, encoded by hand. values: [height, width, channels]."""
    height, width = values.shape[:2]
    rows = np.ascontiguousarray(values.reshape(height, -1).astype(">u2")).view(np.uint8)
    return png_of(rows, width, 16, color_type, trns)


def png_of(
    rows: Bytes, width: int, depth: int, color_type: int, trns: bytes = b"", extra: Sequence[PngChunk] = ()
) -> Bytes:
    """A PNG with this many bits per sample. rows: [height, bytes]. extra: further chunks before the pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), depth, color_type, 0, 0, 0)), *extra]
    chunks += [(b"tRNS", trns)] if trns else []
    chunks += [(b"IDAT", zlib.compress(np.pad(rows, ((0, 0), (1, 0))).tobytes())), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return np.frombuffer(b"\x89PNG\r\n\x1a\n" + body, np.uint8)


@pytest.mark.parametrize(("color_type", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bit_png_keeps_the_high_byte(color_type: int, channels: int) -> None:
    values = np.random.default_rng(1).integers(0, 65536, (9, 7, channels), np.uint16)
    high = (values >> 8).astype(np.uint8)
    color = high[..., :1].repeat(3, axis=2) if channels < 3 else high[..., :3]
    alpha = high[..., -1:] if channels in (2, 4) else high[..., :0]
    assert np.array_equal(decoded(png_16(values, color_type)), np.concatenate((color, alpha), axis=2))


def test_16_bit_grey_compares_its_transparent_colour_in_full() -> None:
    values = np.array([[0x1234, 0x1235], [0x1234, 0xFFFF]], np.uint16)
    pixels = decoded(png_16(values[..., None], 0, struct.pack(">H", 0x1234)))
    assert pixels[..., 3].tolist() == [[0, 255], [0, 255]]
    assert pixels[..., 0].tolist() == [[0x12, 0x12], [0x12, 0xFF]]


@pytest.mark.parametrize(
    "colour", [(0x1234, 0x5678, 0x9ABC), (0, 0, 5), (5, 0, 0), (0x1200, 0x5600, 0x9A00), (0, 0, 0)]
)
def test_16_bit_rgb_compares_its_transparent_colour_in_full(colour: tuple[int, int, int]) -> None:
    named = np.array(colour, np.uint16)
    others = [named ^ np.array(bits, np.uint16) for bits in ((1, 0, 0), (0, 256, 0), (0, 0, 128), (1, 1, 1))]
    swapped = named.byteswap() if (named.byteswap() != named).any() else named ^ 7
    pixels = decoded(png_16(np.array([[named, *others, swapped, named]]), 2, struct.pack(">HHH", *colour)))
    assert pixels[..., 3].tolist() == [[0, 255, 255, 255, 255, 255, 0]]
    assert np.array_equal(pixels[0, 0, :3], named >> 8)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("junk", [0, 0x300], ids=["clean", "higher bits set"])
def test_every_grey_level_of_every_depth_can_be_transparent(depth: int, junk: int) -> None:
    levels = np.arange(2**depth, dtype=np.uint8)
    samples = (levels[:, None] >> np.arange(depth)[::-1]) & 1
    rows = np.packbits(samples.reshape(1, -1), axis=1)
    for level in levels.tolist():
        if depth == 1 and junk:
            continue  # Pillow takes any bit for the one
        pixels = decoded(png_of(rows, len(levels), depth, 0, struct.pack(">H", level | junk)))
        assert pixels[0, :, 3].tolist() == [0 if other == level else 255 for other in levels]
        assert pixels[0, :, 0].tolist() == (levels * (255 // (2**depth - 1))).tolist()


def test_the_transparent_colour_of_8_bit_rgb_has_8_bits() -> None:
    rows = np.array([[1, 2, 3, 1, 2, 4]], np.uint8)
    for named in ((1, 2, 3), (0x301, 0x302, 3)):
        assert decoded(png_of(rows, 2, 8, 2, struct.pack(">HHH", *named)))[..., 3].tolist() == [[0, 255]]


@pytest.mark.parametrize(("depth", "color_type"), [(2, 0), (4, 0), (16, 0), (16, 2)])
def test_an_edit_of_a_transparent_colour_leaves_all_other_pixels(depth: int, color_type: int) -> None:
    samples = np.zeros((32, 32), np.uint8)
    samples[8:24, 8:24] = 3
    if depth < 16:
        bits = (samples[..., None] >> np.arange(depth)[::-1]) & 1
        upload = png_of(np.packbits(bits.reshape(32, -1), axis=1), 32, depth, 0, struct.pack(">H", 3))
    else:
        channels = 3 if color_type else 1
        values = np.repeat(samples[..., None].astype(np.uint16), channels, axis=2)
        upload = png_16(values, color_type, struct.pack(f">{channels}H", *[3] * channels))
    prepared = prepare(upload)
    assert not prepared.unmasked
    result = compose(np.full((*prepared.mask.shape, 3), 200, np.uint8), upload)
    assert (result[samples == 0] == 0).all()
    assert (result[12:20, 12:20] == 200).all()


def test_cmyk_jpeg_becomes_rgb() -> None:
    image = Image.new("RGB", (16, 16), (200, 30, 60)).convert("CMYK")
    pixels = decoded(file_of(image, "JPEG", quality=100))
    assert pixels.shape == (16, 16, 3)
    assert np.abs(pixels.astype(int) - (200, 30, 60)).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(orientation: int, kind: str) -> None:
    upright = np.zeros((32, 48, 3), np.uint8)
    upright[:16, :16] = (255, 0, 0)  # top left
    upright[:16, 32:] = (0, 255, 0)  # top right
    inverse = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    image = Image.fromarray(upright)
    stored = image if inverse is None else image.transpose(Image.Transpose(inverse))
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decoded(file_of(stored, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {})))
    assert pixels.shape == upright.shape
    assert np.abs(pixels[4, 4].astype(int) - (255, 0, 0)).max() < 40
    assert np.abs(pixels[4, 44].astype(int) - (0, 255, 0)).max() < 40


def test_nonsense_exif_means_no_orientation() -> None:
    image = noise(8, 8, 3)
    for exif in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"x"):
        assert decoded(file_of(image, exif=exif)).tolist() == image.tolist()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.fromarray(noise(16, 16, 3, seed=i)) for i in range(3)]
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert np.array_equal(decoded(data), np.asarray(frames[0]))


def test_jpeg_with_several_pictures_gives_the_first() -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    pixels = decoded(file_of(frames[0], "MPO", save_all=True, append_images=frames[1:]))
    assert np.abs(pixels.astype(int) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "ICO", "PPM"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(InvalidImageError):
        decoded(file_of(noise(16, 16, 3), kind))


def test_pillow_does_not_import_all_its_plugins_for_an_upload() -> None:
    decoded(file_of(noise(4, 4, 3), "WEBP"))
    assert set(image_codec.FORMATS) <= set(Image.OPEN)


ROTATED = b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"  # orientation 6
CORRUPTIBLE = {
    "png": lambda: file_of(noise(40, 40, 3)),
    "palette": lambda: file_of(Image.fromarray(noise(40, 40, 3)).convert("P"), transparency=3),
    "grey16": lambda: png_16(np.full((5, 5, 1), 7, np.uint16), 0, b"\0\7"),
    "rgb16": lambda: png_16(np.full((5, 5, 3), 7, np.uint16), 2, b"\0\7" * 3),
    "grey4": lambda: png_of(np.full((9, 5), 0x73, np.uint8), 10, 4, 0, b"\0\7", ALL_CHUNKS),
    "webp": lambda: file_of(noise(40, 40, 4), "WEBP", lossless=True),
    "lossy": lambda: file_of(noise(40, 40, 4), "WEBP"),
    "jpeg": lambda: file_of(noise(40, 40, 3), "JPEG", exif=ROTATED),
}


@pytest.mark.parametrize("name", CORRUPTIBLE)
def test_a_cut_file_is_an_invalid_image(name: str) -> None:
    data = CORRUPTIBLE[name]()
    for length in {*range(0, len(data) - 64, 37), 0, 1, 12, 30}:
        with pytest.raises(InvalidImageError, match="Invalid image file or mode for image 1"):
            decoded(data[:length])


@pytest.mark.parametrize("name", CORRUPTIBLE)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_decodes_or_is_an_invalid_request(name: str, data: st.DataObject) -> None:
    damaged = CORRUPTIBLE[name]().copy()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(damaged) - 1, data.draw(st.sampled_from([64, 10_000])))))
        damaged[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidRequestError):
        assert decoded(damaged).ndim == 3


# ------------------------------------------------------------------------------------------------------------- errors

IMAGE = file_of(noise(30, 40, 3))
MASK = alpha_mask(box_keep(40, 30, 5, 5, 20, 20))
ERRORS: dict[str, tuple[Bytes | None, Bytes | None, MaskKind, type[Exception], str, str, str]] = {
    "not an image": (file_of(noise(3, 3, 3))[8:], MASK, "alpha", InvalidImageError, "image", "invalid_image_file",
                     "Invalid image file or mode for image 1, please check your image file.*PNG, WebP and JPEG"),
    "empty": (np.empty(0, np.uint8), MASK, "alpha", InvalidImageError, "image", "invalid_image_file", "image 1"),
    "mask unreadable": (IMAGE, MASK[:50], "alpha", InvalidImageError, "mask", "invalid_mask_image_format",
                        "Invalid mask image format"),
    "mask_image unreadable": (IMAGE, MASK[:50], "luminance", InvalidImageError, "mask_image",
                              "invalid_mask_image_format", "Invalid mask image format"),
    "mask without alpha": (IMAGE, file_of(noise(30, 40, 3)), "alpha", InvalidImageError, "mask",
                           "invalid_mask_image_format", "mask image missing alpha channel.*mask_image"),
    "grey mask": (IMAGE, file_of(noise(30, 40)), "alpha", InvalidImageError, "mask", "invalid_mask_image_format",
                  "mask_image"),
    "mask size": (IMAGE, alpha_mask(box_keep(30, 40, 5, 5, 20, 20)), "alpha", InvalidImageError, "mask",
                  "invalid_mask_image_format", "mask size does not match image size"),
    "nothing selected": (IMAGE, alpha_mask(box_keep(40, 30, 0, 0, 0, 0)), "alpha", InvalidRequestError, "mask",
                         "invalid_value", "selects nothing"),
    "nothing white": (IMAGE, file_of(np.full((30, 40), 127, np.uint8)), "luminance", InvalidRequestError, "mask_image",
                      "invalid_value", "selects nothing"),
    "image too large": (file_of(np.zeros((2001, 2000), np.uint8)), MASK, "alpha", InvalidRequestError, "image",
                        "image_too_large", "2000x2001 pixels are more than the 4000000 allowed"),
    "mask too large": (IMAGE, file_of(np.zeros((2001, 2000), np.uint8)), "alpha", InvalidRequestError, "mask",
                       "image_too_large", "'mask'"),
    "neither image nor canvas": (None, None, "alpha", InvalidImageError, "image", "missing_required_parameter",
                                 "Missing required parameter"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_those_of_the_images_api(case: str) -> None:
    image, mask, kind, error_type, param, code, message = ERRORS[case]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        prepare(image, mask, kind)
    assert type(caught.value) is error_type
    assert (caught.value.param, caught.value.code) == (param, code)


def png_bomb(width: int, height: int) -> Bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(100))
    chunks = b"".join(struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data))
    return np.frombuffer(b"\x89PNG\r\n\x1a\n" + chunks, np.uint8)


def webp_bomb() -> Bytes:
    data = file_of(
        noise(8, 8, 4), "WEBP", lossless=True, save_all=True, append_images=[Image.new("RGBA", (8, 8))]
    ).copy()
    at = data.tobytes().index(b"VP8X") + 12
    data[at : at + 6] = 255  # a canvas of 2^24 x 2^24
    return data


@pytest.mark.parametrize(
    "bomb", [png_bomb(2001, 2000), png_bomb(100_000, 100_000), webp_bomb()], ids=["4M", "10G", "webp"]
)
def test_a_bomb_is_refused_by_its_header(bomb: Bytes) -> None:
    started = time.process_time()
    with pytest.raises(InvalidRequestError) as caught:
        prepare(bomb)
    assert (caught.value.param, caught.value.code) == ("image", "image_too_large")
    assert time.process_time() - started < 0.5


def test_the_pixel_limit_is_inclusive() -> None:
    assert prepare(file_of(np.zeros((20, 20, 3), np.uint8)), max_pixels=400).upload_size == (20, 20)
    with pytest.raises(InvalidRequestError, match="400"):
        prepare(file_of(np.zeros((20, 21, 3), np.uint8)), max_pixels=400)


# -------------------------------------------------------------------------------------------------------------- masks


def test_luminance_of_at_least_128_is_edited_and_alpha_means_nothing() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    rgba = np.dstack([levels] * 3 + [np.zeros_like(levels)])
    for mask in (levels, rgba):
        prepared = prepare(file_of(noise(16, 16, 3)), file_of(mask), "luminance")
        assert np.array_equal(prepared.mask, (levels >= 128).astype(np.uint8))


@pytest.mark.parametrize(("channel", "kind"), [(0, "red"), (1, "green"), (2, "blue")])
def test_a_channel_of_at_least_128_is_edited(channel: int, kind: MaskKind) -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    mask = np.zeros((16, 16, 3), np.uint8)
    mask[..., channel] = levels
    prepared = prepare(file_of(noise(16, 16, 3)), file_of(mask), kind)
    assert np.array_equal(prepared.mask, (levels >= 128).astype(np.uint8))


def test_a_pictures_own_transparency_may_be_asked_for_or_ignored() -> None:
    keep = box_keep(32, 32, 3, 4, 20, 17)
    pictures = [
        file_of(np.dstack([np.full((32, 32, 3), 9, np.uint8), alpha])) for alpha in (keep, np.full_like(keep, 255))
    ]
    assert np.array_equal(prepare(pictures[0], None, "own").mask, (keep == 0).astype(np.uint8))
    assert prepare(pictures[0], None, "none").unmasked
    with pytest.raises(InvalidRequestError, match="the picture has no transparency"):
        prepare(pictures[1], None, "own")


@pytest.mark.parametrize("kind", ["LA", "RGBA", "P", "WEBP"])
def test_every_kind_of_alpha_is_a_mask(kind: str) -> None:
    keep = box_keep(32, 32, 3, 4, 20, 17)
    image = Image.fromarray(np.dstack([np.full((32, 32, 3), 9, np.uint8), keep]))
    if kind == "P":
        image = Image.fromarray((keep // 255).astype(np.uint8)).convert("P")
        data = file_of(image, transparency=0)
    elif kind == "WEBP":
        data = file_of(image, "WEBP", lossless=True)
    else:
        data = file_of(image.convert(kind))
    assert np.array_equal(prepare(file_of(noise(32, 32, 3)), data).mask, (keep == 0).astype(np.uint8))


def test_without_a_mask_the_transparent_area_is_edited_or_everything() -> None:
    keep = box_keep(32, 32, 3, 4, 20, 17)
    transparent = prepare(file_of(np.dstack([noise(32, 32, 3), keep])))
    assert not transparent.unmasked
    assert np.array_equal(transparent.mask, (keep == 0).astype(np.uint8))
    for opaque in (noise(32, 32, 3), np.dstack([noise(32, 32, 3), np.full((32, 32), 255, np.uint8)])):
        prepared = prepare(file_of(opaque))
        assert prepared.unmasked
        assert prepared.mask.all()
        assert prepared.active.tolist() == [0, 1, 2, 3]


def test_the_mask_is_compared_with_the_image_after_its_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = file_of(noise(30, 40, 3), exif=exif)
    prepared = prepare(image, alpha_mask(box_keep(30, 40, 1, 1, 9, 9)))
    assert prepared.upload_size == (30, 40)
    turned = r"40x30 and 30x40.*turned upright.*EXIF"
    with pytest.raises(InvalidImageError, match=turned):
        prepare(image, MASK)
    with pytest.raises(InvalidImageError, match=r"does not match image size \(40x30 and 30x40\)$"):
        prepare(file_of(noise(40, 30, 3)), MASK)


@pytest.mark.parametrize("value", [0, 200])
def test_a_mask_that_vanishes_when_resized_selects_the_pixels_it_touches(value: int) -> None:
    keep = box_keep(1000, 1000, 500, 500, 501, 501, value)
    prepared = prepare(file_of(np.zeros((1000, 1000, 3), np.uint8)), alpha_mask(keep))
    assert (prepared.template.shape, prepared.mask.sum()) == ((256, 256, 3), 1)
    assert prepared.mask[128, 128] == 1
    assert prepared.active.tolist() == [8 * 16 + 8]


# ------------------------------------------------------------------------------------------- what diffusers would do


@pytest.mark.parametrize(("width", "height"), [(256, 256), (250, 130), (777, 501)])
def test_template_and_mask_are_diffusers_own(width: int, height: int) -> None:
    processors = pytest.importorskip("diffusers.image_processor")
    image = noise(height, width, 3)
    grey = noise(height, width, seed=2)
    prepared = prepare(file_of(image), alpha_mask(255 - grey))
    size = {"height": prepared.template.shape[0], "width": prepared.template.shape[1]}
    template = processors.VaeImageProcessor(vae_scale_factor=16).preprocess(Image.fromarray(image), **size)
    mask_processor = processors.VaeImageProcessor(
        vae_scale_factor=16, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )
    mask = mask_processor.preprocess(Image.fromarray(grey), **size)
    assert np.array_equal(prepared.template, ((template[0].permute(1, 2, 0).numpy() + 1) * 127.5).round())
    assert np.array_equal(prepared.mask, mask[0, 0].numpy())


# ----------------------------------------------------------------------------------------------------------- geometry

SIDES = st.one_of(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 70_000))


@settings(max_examples=300, deadline=None)
@given(width=SIDES, height=SIDES, native=st.sampled_from([64, 256, 512, 1000, 1024]))
def test_generation_size(width: int, height: int, native: int) -> None:
    columns, rows = (side // 16 for side in image_ops.generation_size(width, height, native, 16))
    limit = (native // 16) ** 2
    rounded = [max(1, (side + 8) // 16) for side in (width, height)]
    assert image_ops.generation_size(width, height, native, 16) == (columns * 16, rows * 16)
    assert columns >= 1 <= rows
    assert columns * rows <= limit
    if rounded[0] * rounded[1] <= limit:
        assert [columns, rows] == rounded
    elif native <= 256:
        aspect = width / height

        def distance(a: int, b: int) -> float:
            return float(np.log(a / (limit * aspect) ** 0.5) ** 2 + np.log(b / (limit / aspect) ** 0.5) ** 2)

        grids = ((a, b) for a in range(1, limit + 1) for b in range(1, limit // a + 1))
        assert distance(columns, rows) <= min(itertools.starmap(distance, grids)) + 1e-9


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(4096, 256, (24, 2)), (256, 4096, (2, 24)), (9000, 10, (24, 1)), (640, 480, (18, 14)), (384, 384, (16, 16))],
)
def test_generation_size_of_a_model_with_a_longest_side(width: int, height: int, expected: tuple[int, int]) -> None:
    columns, rows = (side // 16 for side in image_ops.generation_size(width, height, 256, 16, 24))
    assert (columns, rows) == expected


@pytest.mark.parametrize(
    ("upload", "native", "expected"),
    [
        ((4000, 3000), 1024, (1184, 880)),
        ((3000, 4000), 1024, (880, 1184)),
        ((5000, 5000), 1024, (1024, 1024)),
        ((250, 130), 256, (256, 128)),
        ((1, 1), 256, (16, 16)),
        ((60_000, 10), 256, (4096, 16)),
        ((10, 60_000), 256, (16, 4096)),
    ],
)
def test_generation_size_examples(upload: tuple[int, int], native: int, expected: tuple[int, int]) -> None:
    assert image_ops.generation_size(*upload, native, 16) == expected


def brute_force_cells(keep: Bytes, size: tuple[int, int], cell: int, margin: int) -> set[int]:
    """Compares every touched pixel with every cell, in integers scaled by the upload's sides."""
    height, width = keep.shape
    hit = set()
    for y, x in np.argwhere(keep < 255).tolist():
        for row, column in itertools.product(range(size[1] // cell), range(size[0] // cell)):
            across = x * size[0] - margin * width < (column + 1) * cell * width and (
                (x + 1) * size[0] + margin * width > column * cell * width
            )
            down = y * size[1] - margin * height < (row + 1) * cell * height and (
                (y + 1) * size[1] + margin * height > row * cell * height
            )
            if across and down:
                hit.add(row * (size[0] // cell) + column)
    return hit


@settings(max_examples=200, deadline=None)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    columns=st.integers(1, 5),
    rows=st.integers(1, 5),
    cell=st.sampled_from([4, 16]),
    margin=st.integers(0, 40),
    data=st.data(),
)
def test_active_tokens(
    width: int, height: int, columns: int, rows: int, cell: int, margin: int, data: st.DataObject
) -> None:
    keep = np.full((height, width), 255, np.uint8)
    for _ in range(data.draw(st.integers(1, 4))):
        keep[data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))] = data.draw(
            st.integers(0, 254)
        )
    size = (columns * cell, rows * cell)
    active = image_ops.active_tokens(keep, size, cell, margin)
    assert active.dtype == np.int32
    assert active.tolist() == sorted(brute_force_cells(keep, size, cell, margin))


def test_tokens_of_a_12_megapixel_mask_take_milliseconds() -> None:
    keep = box_keep(4000, 3000, 100, 100, 3900, 2900)
    started = time.process_time()
    image_ops.active_tokens(keep, (1184, 880), 16, 500)
    assert time.process_time() - started < 0.2


def test_content_id_names_size_and_pixels() -> None:
    pixels = noise(16, 32, 3)
    same = image_ops.content_id(pixels.copy())
    assert image_ops.content_id(pixels) == same
    assert len(same) == 64
    others = [pixels.reshape(32, 16, 3), np.roll(pixels, 1, axis=2)]
    assert same not in {image_ops.content_id(other) for other in others}


# ------------------------------------------------------------------------------------------------------------ compose


@pytest.mark.parametrize(("width", "height"), [(256, 256), (255, 131), (37, 300), (1, 1), (613, 411)])
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("output_format", ["png", "webp"])
def test_outside_the_mask_every_bit_stays(width: int, height: int, channels: int, output_format: OutputFormat) -> None:
    image = noise(height, width, channels)
    keep = np.where(noise(height, width, seed=3) < 60, noise(height, width, seed=4), 255).astype(np.uint8)
    keep[0, 0] = 100
    columns, rows = image_ops.generation_size(width, height, 256, 16)
    result = compose(noise(rows, columns, 3, seed=5), file_of(image), alpha_mask(keep), output_format=output_format)
    assert result.shape == image.shape
    assert np.array_equal(result[keep == 255], image[keep == 255])


def test_soft_masks_blend_by_the_formula() -> None:
    image, generated = noise(256, 256, 4), noise(256, 256, 3, seed=1)
    keep = np.arange(256, dtype=np.uint8)[None].repeat(256, axis=0)
    result = compose(generated, file_of(image), alpha_mask(keep))
    opaque = np.dstack([generated, np.full((256, 256), 255, np.uint8)])
    assert np.array_equal(result, blend(image, opaque, keep))


def test_every_blend_of_two_values_is_rounded_to_the_nearest() -> None:
    source = np.arange(256, dtype=np.uint8)[:, None, None].repeat(256, axis=1).repeat(3, axis=2)
    generated = source.transpose(1, 0, 2).copy()
    for alpha in range(255):
        canvas = Image.fromarray(source)
        image_ops.paste_generated(canvas, generated, np.full((256, 256), alpha, np.uint8))
        exact = (source[..., :1].astype(int) * alpha + generated[..., :1].astype(int) * (255 - alpha)) * 2
        assert (np.abs(np.asarray(canvas)[..., :1].astype(int) * 510 - exact) < 255).all()


def test_the_generated_part_is_the_lanczos_resize_of_all_of_it() -> None:
    # Smooth, as Pillow picks the order of its two passes by size, and on noise they clip differently in between.
    generated = np.asarray(Image.fromarray(noise(13, 18, 3)).resize((288, 208), Image.Resampling.BICUBIC))
    image = noise(300, 410, 3)
    keep = box_keep(410, 300, 33, 41, 390, 202)
    resized = np.asarray(Image.fromarray(generated).resize((410, 300), Image.Resampling.LANCZOS))
    result = compose(generated, file_of(image), alpha_mask(keep)).astype(int)
    assert np.abs(result - blend(image, resized, keep)).max() <= 2
    same_size = compose(generated, file_of(noise(208, 288, 3)), alpha_mask(box_keep(288, 208, 33, 41, 180, 102)))
    assert np.array_equal(same_size[41:102, 33:180], generated[41:102, 33:180])


def test_the_images_own_transparency_is_filled() -> None:
    image, keep = noise(64, 64, 3), noise(64, 64, seed=2)
    generated = noise(64, 64, 3, seed=1)
    result = compose(generated, file_of(np.dstack([image, keep])))
    assert np.array_equal(result, blend(image, generated, keep))


def test_palette_and_grey_uploads_leave_as_rgb() -> None:
    grey = noise(64, 64)
    keep = box_keep(64, 64, 0, 0, 32, 64)
    palette = Image.fromarray(noise(64, 64, 3)).convert("P")
    for upload in (Image.fromarray(grey), palette):
        result = compose(noise(64, 64, 3, seed=1), file_of(upload), alpha_mask(keep))
        assert np.array_equal(result[:, 32:], np.asarray(upload.convert("RGB"))[:, 32:])


def test_a_canvas_is_wholly_generated() -> None:
    prepared = prepare(None, canvas=(100, 60))
    assert prepared.unmasked
    assert prepared.upload_size == (100, 60)
    generated = noise(*prepared.template.shape)
    expected = np.asarray(Image.fromarray(generated).resize((100, 60), Image.Resampling.LANCZOS))
    assert np.array_equal(compose(generated, None, canvas=(100, 60)), expected)


def test_output_size_resizes_the_composite() -> None:
    image, generated = noise(64, 64, 3), noise(64, 64, 3, seed=1)
    mask = alpha_mask(box_keep(64, 64, 10, 10, 40, 40))
    whole = compose(generated, file_of(image), mask)
    encoded, size = compose_bytes(generated, file_of(image), mask, size=(96, 48))
    assert size == (96, 48)
    expected = np.asarray(Image.fromarray(whole).resize((96, 48), Image.Resampling.LANCZOS))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encoded))), expected)


def test_jpeg_is_flattened_on_white_and_obeys_its_quality() -> None:
    clear = np.zeros((64, 64, 4), np.uint8)
    mask = alpha_mask(box_keep(64, 64, 0, 0, 8, 8))
    pixels = noise(64, 64, 3)
    assert compose(pixels, file_of(clear), mask, output_format="jpeg")[40:, 40:].min() >= 250
    photo = file_of(np.asarray(Image.fromarray(noise(8, 8, 3)).resize((64, 64))))
    sizes = [len(compose_bytes(pixels, photo, mask, output_format="jpeg", compression=c)[0]) for c in (0, 40, 80, 100)]
    assert sizes == sorted(set(sizes))


def test_colour_profile_is_kept_and_orientation_and_comments_are_not() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[0x0112] = 3
    upload = file_of(noise(64, 64, 3), "JPEG", icc_profile=profile, exif=exif, comment=b"private")
    for output_format in ("png", "webp", "jpeg"):
        encoded, _ = compose_bytes(
            noise(64, 64, 3), upload, alpha_mask(box_keep(64, 64, 1, 1, 9, 9)), output_format=output_format
        )
        result = Image.open(io.BytesIO(encoded))
        assert result.info["icc_profile"] == profile
        assert not result.getexif()
        assert b"private" not in encoded


ALL_CHUNKS: tuple[PngChunk, ...] = (
    (b"gAMA", struct.pack(">I", 100000)),
    (b"cHRM", struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)),
    (b"cICP", bytes((9, 16, 0, 1))),
    (b"mDCV", bytes(range(24))),
    (b"cLLI", struct.pack(">II", 10_000_000, 4_000_000)),
)


def chunks_of(encoded: bytes) -> dict[bytes, bytes]:
    found = chunks_before_pixels(np.frombuffer(encoded, np.uint8))
    return {kind: bytes(content) for kind, content in found if kind != b"IHDR"}


def upload_with(*chunks: PngChunk, side: int = 64) -> Bytes:
    return png_of(noise(side, side * 3), side, 8, 2, extra=chunks)


SRGB_CHUNK = (b"sRGB", b"\1")


@pytest.mark.parametrize(
    "chunks",
    [ALL_CHUNKS[:1], ALL_CHUNKS[:2], ALL_CHUNKS[2:3], ALL_CHUNKS, (SRGB_CHUNK,)],
    ids=["gAMA", "gAMA and cHRM", "cICP", "all", "sRGB"],
)
@pytest.mark.parametrize("crop", [None, (8, 8, 40, 40)], ids=["whole", "crop"])
@pytest.mark.parametrize("size", [None, (48, 32)], ids=["its size", "resized"])
def test_colour_chunks_of_a_png_are_kept(
    chunks: tuple[PngChunk, ...], crop: Box | None, size: tuple[int, int] | None
) -> None:
    mask = alpha_mask(box_keep(64, 64, 10, 10, 30, 30))
    encoded, _ = compose_bytes(noise(64, 64, 3), upload_with(*chunks), mask, crop=crop, size=size)
    assert chunks_of(encoded) == dict(chunks)
    Image.open(io.BytesIO(encoded)).load()


DISPLAY_P3, SRGB_CODES = (b"cICP", bytes((12, 13, 0, 1))), (b"cICP", bytes((1, 13, 0, 1)))


@pytest.mark.parametrize("output_format", ["webp", "jpeg"])
@pytest.mark.parametrize(
    ("chunks", "lost"),
    [
        ((), ()),
        ((SRGB_CHUNK, ALL_CHUNKS[0]), ()),
        (((b"gAMA", struct.pack(">I", 45455)),), ()),
        ((SRGB_CODES, *ALL_CHUNKS[:2]), ()),
        (ALL_CHUNKS[:1], ("gAMA",)),
        (ALL_CHUNKS[:2], ("gAMA", "cHRM")),
        (ALL_CHUNKS, ("cICP",)),
        ((DISPLAY_P3, SRGB_CHUNK), ("cICP",)),
    ],
)
def test_colour_information_that_a_format_cannot_hold_is_reported_if_it_is_not_srgb(
    output_format: OutputFormat, chunks: tuple[PngChunk, ...], lost: tuple[str, ...]
) -> None:
    assert image_codec.decode(upload_with(*chunks), "image", MAX_PIXELS).colour.lost_in(output_format) == lost
    assert image_codec.decode(upload_with(*chunks), "image", MAX_PIXELS).colour.lost_in("png") == ()


def test_a_result_with_colour_chunks_can_be_edited_again() -> None:
    mask = alpha_mask(box_keep(64, 64, 10, 10, 30, 30))
    once, _ = compose_bytes(noise(64, 64, 3), upload_with(*ALL_CHUNKS), mask)
    twice, _ = compose_bytes(noise(64, 64, 3), np.frombuffer(once, np.uint8), mask)
    assert twice == once


@pytest.mark.parametrize(
    "chunk", [(b"gAMA", b"\0" * 5), (b"cICP", b"\1\1\0"), (b"mDCV", b""), (b"sBIT", b"\5\6\5"), (b"tEXt", b"a\0b")]
)
def test_chunks_of_wrong_length_or_without_colour_information_are_dropped(chunk: PngChunk) -> None:
    encoded, _ = compose_bytes(noise(64, 64, 3), upload_with(chunk))
    assert chunks_of(encoded) == {}


def test_the_first_of_two_chunks_of_a_type_counts_and_a_profile_counts_before_srgb() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    iccp = (b"iCCP", b"ICC Profile\0\0" + zlib.compress(profile))
    second = (b"gAMA", struct.pack(">I", 50000))
    encoded, _ = compose_bytes(noise(64, 64, 3), upload_with(ALL_CHUNKS[0], second, SRGB_CHUNK, iccp))
    assert chunks_of(encoded) == dict([ALL_CHUNKS[0], iccp])


@pytest.mark.parametrize("output_format", ["PNG", "WEBP", "JPEG"])
def test_a_picture_with_a_large_profile_is_read(output_format: str) -> None:
    """As of a printer. Results cannot have it, which is told."""
    profile = bytes(16) + b"RGB " + noise(2_000_000).tobytes()
    upload = file_of(noise(16, 16, 3), output_format, icc_profile=profile)
    colour = image_codec.decode(upload, "image", 1000).colour
    assert colour == Colour(has_unusable_profile=True)


def test_a_png_file_with_long_descriptions_is_read() -> None:
    """A program's, such as what was done to the picture."""
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", "x" * 2_000_000, zip=True)
    pixels = noise(16, 16, 3)
    decoded = image_codec.decode(file_of(pixels, pnginfo=info), "image", 1000).image
    assert np.array_equal(np.asarray(decoded), pixels)


def test_a_profile_of_another_colour_space_is_dropped() -> None:
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    profile[16:20] = b"GRAY"
    upload = file_of(noise(16, 16), icc_profile=bytes(profile))
    encoded, _ = compose_bytes(noise(16, 16, 3), upload)
    assert "icc_profile" not in Image.open(io.BytesIO(encoded)).info
    assert image_codec.decode(upload, "image", MAX_PIXELS).colour.lost_in("png") == ("ICC profile",)


# ----------------------------------------------------------------------------------------------------- bytes and bounds


@pytest.mark.parametrize("output_format", ["png", "webp", "jpeg"])
@pytest.mark.parametrize("remainder", range(3))
def test_base64_is_the_file_as_text(output_format: OutputFormat, remainder: int) -> None:
    image = noise(61 + remainder, 67, 3)
    plain, _ = compose_bytes(image[:16, :16].copy(), file_of(image), output_format=output_format)
    text, _ = compose_bytes(image[:16, :16].copy(), file_of(image), output_format=output_format, as_base64=True)
    assert text == base64.b64encode(plain)


@pytest.mark.parametrize("output_format", ["png", "webp", "jpeg"])
@pytest.mark.parametrize("compression", [0, 99, 100])
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 3000), (3000, 1), (601, 333)])
def test_noise_fits_its_bound_and_one_byte_less_than_needed_is_refused(
    output_format: OutputFormat, compression: int, binary: bool, width: int, height: int
) -> None:
    for channels, as_base64 in ((3, False), (4, True)):
        pixels = noise(height, width, channels)
        image = Image.fromarray((pixels // 128 * 255) if binary else pixels)
        bound = image_codec.encoded_bytes(width, height, channels, as_base64, output_format)
        assert bound <= image_codec.encoded_bytes(width, height, channels, as_base64)
        room = np.zeros(bound, np.uint8)
        colour = Colour(noise(MAX_ICC_BYTES).tobytes(), ALL_CHUNKS)
        written = image_codec.encode(image, output_format, compression, colour, as_base64, room)
        assert written <= bound
        tight = np.zeros(written + 64, np.uint8)
        with pytest.raises(EngineError, match="does not fit"):
            image_codec.encode(image, output_format, compression, colour, as_base64, tight[: written - 1])
        assert not tight[written - 1 :].any()


def test_a_format_that_cannot_hold_the_size_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="16383 pixels a side, not 16384x1; use 'png'") as caught:
        compose_bytes(noise(16, 16, 3), None, canvas=(16384, 1), output_format="webp")
    assert caught.value.param == "output_format"


@settings(max_examples=100, deadline=None)
@given(width=SIDES, height=SIDES, native=st.sampled_from([16, 250, 256, 1024]), token=st.sampled_from([8, 16]))
def test_scratch_holds_any_prepared_edit(width: int, height: int, native: int, token: int) -> None:
    columns, rows = image_ops.generation_size(width, height, native, token)
    tokens = columns * rows // token**2
    arrays = (columns * rows * 3, columns * rows, tokens * 4)
    aligned = sum(-(-size // image_ops.ALIGNMENT) * image_ops.ALIGNMENT for size in arrays)
    assert aligned <= image_ops.scratch_bytes(native, token)


# ---------------------------------------------------------------------------------------------------------- two passes


@pytest.mark.parametrize(
    ("size", "scale", "expected"),
    [
        ((256, 128), 2.0, (128, 64)),
        ((256, 256), 1.5, (176, 176)),  # 10.67 tokens
        ((208, 256), 4.0, (48, 64)),  # 3.25 tokens
        ((32, 48), 1.2, (32, 48)),  # 1.67 and 2.5 tokens
    ],
)
def test_size_of_a_first_pass(size: tuple[int, int], scale: float, expected: tuple[int, int]) -> None:
    assert smaller_size(size, 16, first_pass(scale)) == expected


@pytest.mark.parametrize(("size", "scale"), [((256, 80), 4.0), ((16, 256), 1.1), ((48, 48), 2.1)])
def test_a_first_pass_that_is_too_small_is_refused(size: tuple[int, int], scale: float) -> None:
    with pytest.raises(
        InvalidRequestError, match="need 32 pixels; give a larger picture, or a smaller hires_scale"
    ) as caught:
        prepare(None, canvas=size, hires_scale=scale)
    assert caught.value.param == "hires_scale"


@pytest.mark.parametrize("padding", [None, 20])
def test_a_first_pass_sees_the_upload_as_an_edit_of_its_size_does(padding: int | None) -> None:
    """Its arrays are those of the same upload for a model of a quarter of the area; the final ones stay as they are."""
    image, mask = file_of(noise(250, 250, 3)), alpha_mask(box_keep(250, 250, 90, 60, 170, 140))
    two = prepare(image, mask, padding=padding, hires_scale=2.0, margin=7)
    height, width, _ = two.template.shape
    assert two.canvases["first"].template.shape == (height // 2, width // 2, 3)
    one, small = prepare(image, mask, padding=padding, margin=7), two.canvases["first"]
    assert not one.canvases
    assert one.content_id == two.content_id
    for name in ("template", "mask", "active"):
        assert np.array_equal(getattr(two, name), getattr(one, name))
    smaller = prepare(image, mask, padding=padding, native=128, margin=7)
    for name in ("template", "mask", "active"):
        assert np.array_equal(getattr(small, name), getattr(smaller, name))


def test_a_generation_has_a_first_pass_of_its_own() -> None:
    two = prepare(None, canvas=(256, 192), hires_scale=2.0)
    assert two.canvases["first"].template.shape == (96, 128, 3)
    assert two.canvases["first"].mask.all()
    assert np.array_equal(two.canvases["first"].active, np.arange(48))


@settings(max_examples=100, deadline=None)
@given(width=SIDES, height=SIDES, scale=st.floats(1.1, 4.0), token=st.sampled_from([8, 16]))
def test_scratch_holds_both_passes(width: int, height: int, scale: float, token: int) -> None:
    final = image_ops.generation_size(width, height, 256, token)
    try:
        first = smaller_size(final, token, first_pass(scale))
    except InvalidRequestError:
        return
    total = 0
    for columns, rows in (final, first):
        arrays = (columns * rows * 3, columns * rows, columns * rows // token**2 * 4)
        total += sum(-(-size // image_ops.ALIGNMENT) * image_ops.ALIGNMENT for size in arrays)
    assert total <= image_ops.scratch_bytes(256, token, num_canvases=2)


# --------------------------------------------------------------------------------------------------------------- crops


@pytest.mark.parametrize("box", [(100, 80, 140, 130), (0, 0, 30, 9), (380, 290, 400, 300), (0, 100, 400, 110)])
@pytest.mark.parametrize("padding", [0, 7, 32, 65535])
def test_the_model_sees_the_crop_and_its_result_is_pasted_in_place(
    box: tuple[int, int, int, int], padding: int
) -> None:
    photo, keep = noise(300, 400, 3), box_keep(400, 300, *box)
    prepared = prepare(file_of(photo), alpha_mask(keep), padding=padding)
    height, width, _ = prepared.template.shape
    assert (width, height) == (288, 224), "the photo's aspect, on all of 256 squared"
    assert prepared.crop is not None
    left, top, right, bottom = prepared.crop
    assert 0 <= left <= max(0, box[0] - padding) < min(400, box[2] + padding) <= right <= 400
    assert 0 <= top <= max(0, box[1] - padding) < min(300, box[3] + padding) <= bottom <= 300
    assert (right - left) / (bottom - top) == pytest.approx(width / height, rel=0.05)
    assert prepared.content_id != prepare(file_of(photo), alpha_mask(keep)).content_id
    tokens = np.zeros((height // 16, width // 16), bool)
    tokens.reshape(-1)[prepared.active] = True
    assert np.kron(tokens, np.ones((16, 16), bool))[prepared.mask > 0].all()
    out = compose(noise(height, width, 3, seed=1), file_of(photo), alpha_mask(keep), crop=prepared.crop)
    assert np.array_equal(out[keep == 255], photo[keep == 255])
    assert (out[keep == 0] != photo[keep == 0]).mean() > 0.9


def test_a_picture_that_is_not_changed_comes_back_to_its_place() -> None:
    """A smooth picture, which resizing twice leaves unchanged."""
    ramp = np.add.outer(np.arange(300), np.arange(400))[..., None] * np.array([0.3, 0.2, 0.1]) + 20
    photo, keep = ramp.astype(np.uint8), box_keep(400, 300, 150, 60, 220, 100)
    prepared = prepare(file_of(photo), alpha_mask(keep), padding=5)
    out = compose(prepared.template, file_of(photo), alpha_mask(keep), crop=prepared.crop)
    assert np.abs(out.astype(int) - photo).max() <= 1


def test_a_small_crop_has_more_tokens_under_its_mask_the_less_padding() -> None:
    photo, mask = file_of(noise(300, 400, 3)), alpha_mask(box_keep(400, 300, 150, 60, 220, 100))
    ratios = [prepare(photo, mask, padding=padding).active.size for padding in (0, 20, 100)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] > prepare(photo, mask).active.size
    margins = [prepare(photo, mask, padding=50, margin=margin).active.size for margin in (0, 16, 32)]
    assert margins == sorted(set(margins)), "pixels of the crop at generation size"


def test_a_crop_by_the_pictures_own_transparency() -> None:
    pixels = np.dstack([noise(60, 100, 3), box_keep(100, 60, 10, 10, 40, 30)])
    prepared = prepare(file_of(pixels), padding=4)
    assert prepared.crop is not None
    out = compose(noise(*prepared.template.shape, seed=1), file_of(pixels), crop=prepared.crop)
    outside = pixels[..., 3] == 255
    assert np.array_equal(out[outside], pixels[..., :3][outside])


def test_a_crop_without_a_mask_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="no mask to crop around") as caught:
        prepare(file_of(noise(60, 100, 3)), padding=4)
    assert caught.value.param == "padding_mask_crop"
    with pytest.raises(InvalidRequestError) as caught:
        prepare(file_of(noise(60, 100, 3)), alpha_mask(np.full((60, 100), 255, np.uint8)), padding=4)
    assert caught.value.param == "mask"


@settings(max_examples=100, deadline=None)
@given(
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    corners=st.tuples(*[st.floats(0, 1)] * 4),
    padding=st.integers(0, 300),
    margin=st.sampled_from([0, 16]),
)
def test_any_crop_paints_under_its_mask_alone(
    size: tuple[int, int], corners: tuple[float, float, float, float], padding: int, margin: int
) -> None:
    (width, height), (x0, y0, x1, y1) = size, corners
    left, top = int(min(x0, x1) * (width - 1)), int(min(y0, y1) * (height - 1))
    right, bottom = int(max(x0, x1) * (width - 1)) + 1, int(max(y0, y1) * (height - 1)) + 1
    photo, keep = noise(height, width, 3), box_keep(width, height, left, top, right, bottom)
    prepared = prepare(file_of(photo), alpha_mask(keep), native=64, margin=margin, padding=padding)
    columns = prepared.template.shape[1] // 16
    under = {int(y) // 16 * columns + int(x) // 16 for y, x in zip(*np.nonzero(prepared.mask), strict=True)}
    assert under
    assert under <= set(prepared.active.tolist())
    out = compose(255 - prepared.template, file_of(photo), alpha_mask(keep), crop=prepared.crop)
    assert np.array_equal(out[keep == 255], photo[keep == 255])

"""The pixel operations of the image processors: `prepare` makes template, mask and active tokens from an upload,
`compose` pastes generated pixels into the upload and encodes the result. Numpy and Pillow only.

Sizes are (width, height) in pixels; arrays are [height, width(, channels)]. `keep` is the mask used to paste back:
uint8 [height, width] at upload size, 255 = keep the upload's pixel, 0 = take the generated one, between = blend.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from operator import truediv

import numpy as np
import numpy.typing as npt
from PIL import Image

from core.errors import InvalidImageError, InvalidRequestError
from core.mask_request import SOFT_REACH
from core.messages.canvas import EMPTY_RGB
from core.messages.image_processor import (
    Box,
    ComposeImage,
    MaskKind,
    PreparedCanvas,
    PreparedImages,
    PrepareImages,
    ReadPicture,
)
from core.reference_pictures import MAX_ASPECT, ReferencePictures
from engine.images.control_pictures import control_arrays
from engine.images.crop_geometry import CropGeometry, Size, covering, crop_region, fitted, lay
from engine.images.generation_size import crop_size, generation_size, smaller_size
from engine.images.image_codec import (
    Bytes,
    DecodedImage,
    check_output_size,
    check_pixels,
    decode,
    encode,
    encoded_bytes,
)
from engine.images.masks import (
    active_tokens,
    edited_box,
    found_keep,
    grown_keep,
    mask_file,
    masked_tokens,
    model_mask,
    soft_keep,
)

__all__ = [
    "PreparedArrays",
    "check_output_size",
    "compose",
    "encoded_bytes",
    "generation_size",
    "prepare",
    "prepare_nothing",
    "read_picture",
    "scratch_bytes",
]

CONTENT_FORMAT = 1  # part of every content id: increase it when the same upload gives a different template
ALIGNMENT = 64  # bytes, of each array carved from a scratch region
MAX_COVER_PIXELS = 2**26
"""Largest picture, in pixels, to which generated pixels are scaled as a whole for a crop: 0.2 GB in RGB."""


@dataclass(frozen=True, slots=True)
class CanvasArrays:
    """The arrays of an upload at one size."""

    template: Bytes  # [height, width, 3] RGB
    mask: Bytes  # [height, width], 1 = edit
    active: npt.NDArray[np.int32]  # [active tokens], row-major, ascending
    controls: Sequence[Bytes]  # control pictures, [height, width, 3] RGB each

    @property
    def all(self) -> list[npt.NDArray[np.generic]]:
        """All of these."""
        return [self.template, self.mask, self.active, *self.controls]


@dataclass(frozen=True, slots=True)
class PreparedArrays(CanvasArrays):
    """The arrays that the engine needs, at generation size; the fields are those of PreparedImages."""

    upload_size: tuple[int, int]
    content_id: str
    unmasked: bool
    crop: Box | None  # the part of the upload that the template shows; None: all of it
    canvases: Mapping[str, CanvasArrays]  # at further sizes, by name
    references: Sequence[Bytes]  # [height, width, 3] RGB each


@dataclass(frozen=True, slots=True)
class Composed:
    """A result that was written into `out`, `nbytes` long. The other fields are those of ComposedImage."""

    nbytes: int
    size: Size
    colour_lost: tuple[str, ...]
    box: Box  # around all that was edited


@dataclass(frozen=True, slots=True)
class _Upload:
    picture: DecodedImage
    keep: Bytes
    own_mask: bool  # the mask is the picture's own transparency, or there is no mask
    unmasked: bool


# ---------------------------------------------------------------------------------------------------------- both ways


def prepare(
    job: PrepareImages,
    image: Bytes | None,
    mask: Bytes | None,
    references: Sequence[Bytes] = (),
    controls: Sequence[Bytes] = (),
) -> PreparedArrays:
    """Decode and check the files of `job` (uint8 [bytes]) and make the arrays that the engine needs.

    The template is resized as in diffusers' VaeImageProcessor (Pillow, Lanczos, in uint8). With padding_mask_crop it is
    a crop around the mask, and mask and active tokens are those of the crop. Arrays of other sizes are made in the same
    way. Raises InvalidImageError and InvalidRequestError; `param` is the field at fault.
    """
    upload = _upload_of(job, image, mask)
    size, crop = _view_of(upload, job)
    sizes = {scale.name: smaller_size(size, job.token_size, scale) for scale in job.scales}
    picture, keep = upload.picture.image, upload.keep
    first, *others = control_arrays(controls, job, picture.size, crop, [size, *sizes.values()])
    if crop is not None:
        left, top, right, bottom = crop
        picture, keep = picture.crop(crop), keep[top:bottom, left:right]
    picture = picture.convert("RGB")
    final = _canvas_arrays(picture, keep, size, job, first)
    shown = [_reference(file, job) for file in references]
    return PreparedArrays(
        template=final.template,
        mask=final.mask,
        active=final.active,
        controls=final.controls,
        upload_size=upload.picture.image.size,
        content_id=content_id(final.template, *shown),
        unmasked=upload.unmasked,
        crop=crop,
        canvases={
            name: _canvas_arrays(picture, keep, size, job, its)
            for (name, size), its in zip(sizes.items(), others, strict=True)
        },
        references=shown,
    )


def prepare_nothing(job: PrepareImages) -> PreparedImages:
    """The sizes of a picture that is made from nothing: `job` has no files. Raises InvalidImageError and
    InvalidRequestError as `prepare` does, for its size.
    """
    size, native_size, token_size = _empty_size(job.canvas_size, job.max_pixels), job.native_size, job.token_size
    width, height = generation_size(*size, native_size, token_size, job.max_side)
    sizes = {scale.name: smaller_size((width, height), token_size, scale) for scale in job.scales}
    return PreparedImages(
        job_id=job.job_id,
        upload_width=size[0],
        upload_height=size[1],
        width=width,
        height=height,
        template=None,
        mask=None,
        active=None,
        content_id=f"empty {width}x{height}",
        unmasked=True,
        canvases={name: PreparedCanvas(*smaller, None, None, None) for name, smaller in sizes.items()},
    )


def read_picture(job: ReadPicture, file: Bytes) -> Bytes:
    """The pixels of a file (uint8 [bytes]), uint8 [height, width, 3], RGB without transparency. Raises
    InvalidImageError, and InvalidRequestError for a picture larger than declared.
    """
    picture = decode(file, job.param, job.max_pixels).image.convert("RGB")
    (width, height), (most_width, most_height) = picture.size, job.max_size
    if width > most_width or height > most_height:
        why = f"{width}x{height} pixels are more than the {most_width}x{most_height} that the workflow takes"
        raise InvalidRequestError(f"Invalid '{job.param}': {why}.", param=job.param, code="image_too_large")
    return np.asarray(picture)


def _canvas_arrays(
    picture: Image.Image, keep: Bytes, size: Size, job: PrepareImages, controls: Sequence[Bytes]
) -> CanvasArrays:
    """The arrays at `size` of a picture (RGB), which is a crop of the upload where `job` asks for one."""
    geometry = CropGeometry(size) if job.padding_mask_crop is None else fitted(picture.size, size)
    mask = model_mask(keep, size, geometry)
    blended = ceil(SOFT_REACH * job.mask_feather * min(map(truediv, geometry.size, picture.size)))
    active = active_tokens(keep, size, job.token_size, job.mask_margin + blended, geometry)
    return CanvasArrays(
        template=np.asarray(lay(picture, size, geometry)),
        mask=mask,
        active=np.union1d(active, masked_tokens(mask, job.token_size)),
        controls=controls,
    )


def _reference(file: Bytes, job: PrepareImages) -> Bytes:
    """A reference at the size at which the model sees it, uint8 [height, width, 3]. Where references are not enlarged,
    what is beyond a multiple of their sides is cut off on both ends, as the pipelines of FLUX.2 do."""
    rule = job.reference_pictures
    assert rule is not None
    picture = decode(file, "reference_image", job.max_pixels).image.convert("RGB")
    if max(picture.size) > MAX_ASPECT * min(picture.size):
        width, height = picture.size
        message = f"Invalid 'reference_image': {width}x{height} pixels; crop it to an aspect of at most {MAX_ASPECT}."
        raise InvalidRequestError(message, param="reference_image")
    size = rule.size(*picture.size)
    if rule.grows:
        return np.asarray(picture.resize(size, Image.Resampling.LANCZOS))
    shrunk = rule.shrunk(*picture.size)
    if shrunk != picture.size:
        picture = picture.resize(shrunk, Image.Resampling.LANCZOS)
    return np.asarray(lay(picture, size, covering(picture.size, size)))


def _view_of(upload: _Upload, job: PrepareImages) -> tuple[Size, Box | None]:
    """Generation size, and the part of the upload that is edited; None: all of it."""
    size, native_size, token_size = upload.picture.image.size, job.native_size, job.token_size
    if job.padding_mask_crop is None:
        return generation_size(*size, native_size, token_size, job.max_side), None
    if upload.unmasked:
        message = "Invalid 'padding_mask_crop': there is no mask to crop around; give one, or an image with a "
        raise InvalidRequestError(message + "transparent area.", param="padding_mask_crop")
    frame = crop_size(*size, native_size, token_size, job.max_side)
    return frame, crop_region(edited_box(upload.keep), job.padding_mask_crop, size, frame)


def compose(
    job: ComposeImage,
    pixels: Bytes | None,
    image: Bytes | None,
    mask: Bytes | None,
    out: Bytes,
    found: Bytes | None = None,
) -> Composed:
    """Paste `pixels` (uint8 [height, width, 3], generation size) into the original upload and encode it into `out`.
    found: the mask that an engine has found (uint8 [height, width], generation size, 1 = edit). Without `pixels` the
    file is that of the mask, as `mask` of an edit takes it: transparent = edit.

    Every channel is ``round(source * a / 255 + generated * (1 - a / 255))`` with the pixel's `keep` as a, so a = 255
    leaves it bit for bit. With an explicit mask the upload keeps its alpha channel, and generated pixels count as
    opaque: an edit is visible where the upload was transparent. If the upload's own transparency was the mask, or there
    was none, the result is opaque RGB. Palettes and 16-bit files become 8-bit RGB(A). `job.output_size` resizes last.
    Raises as `prepare` and `encode` do.
    """
    upload = _upload_of(job, image, mask)
    keep = upload.keep if found is None else found_keep(found, upload.picture.image.size)
    soft = keep if upload.unmasked else soft_keep(keep, job.mask_feather)
    if pixels is None:
        canvas = mask_file(soft)
    else:
        canvas = upload.picture.image.convert("RGB") if upload.own_mask else upload.picture.image
        paste_generated(canvas, pixels, soft, job.crop)
    if job.output_size is not None and job.output_size != canvas.size:
        canvas = canvas.resize(job.output_size, Image.Resampling.LANCZOS)
    written = encode(canvas, job.output_format, job.compression, upload.picture.colour, job.base64, out)
    return Composed(written, canvas.size, upload.picture.colour.lost_in(job.output_format), edited_box(keep))


def scratch_bytes(native_size: int, token_size: int, num_canvases: int = 1, num_controls: int = 0) -> int:
    """Most bytes that the arrays of a PreparedImages take, alignment included. num_canvases: all sizes. num_controls:
    control pictures."""
    tokens = (native_size // token_size) ** 2
    # Template and mask take 4 bytes a pixel, a token's index 4 bytes, a control picture 3 bytes a pixel. The
    # generation's canvas is the largest.
    of_token = (4 + 3 * num_controls) * token_size**2 + 4
    return num_canvases * (tokens * of_token + (3 + num_controls) * ALIGNMENT)


def reference_bytes(rule: ReferencePictures) -> int:
    """Most bytes that a reference's pixels take, alignment included."""
    return 3 * rule.most_pixels + ALIGNMENT


def _upload_of(job: PrepareImages | ComposeImage, image: Bytes | None, mask: Bytes | None) -> _Upload:
    """The upload with its mask grown, as `job` says. A mask that is found, or to be found, goes before the transparency
    of the picture itself."""
    upload = _read(image, mask, job.mask_kind, job.canvas_size, job.max_pixels)
    is_sought = job.is_mask_sought if isinstance(job, PrepareImages) else job.found is not None
    if is_sought:
        return replace(upload, keep=np.zeros_like(upload.keep), own_mask=False, unmasked=False)
    if upload.unmasked:
        return upload
    return replace(upload, keep=grown_keep(upload.keep, job.mask_grow))


def _read(
    image: Bytes | None, mask: Bytes | None, mask_kind: MaskKind, canvas_size: tuple[int, int] | None, max_pixels: int
) -> _Upload:
    picture = _empty_canvas(canvas_size, max_pixels) if image is None else decode(image, "image", max_pixels)
    if mask is not None:
        keep = _read_mask(mask, mask_kind, picture, max_pixels)
        return _Upload(picture, keep, own_mask=False, unmasked=False)
    if picture.image.mode == "RGBA" and mask_kind != "none":
        alpha = np.asarray(picture.image.getchannel("A"))
        if alpha.min() < 255:
            return _Upload(picture, alpha, own_mask=True, unmasked=False)
    if mask_kind == "own":
        raise InvalidRequestError(
            "Invalid 'mask': the picture has no transparency, so it selects nothing.", param="mask"
        )
    everything = np.zeros((picture.image.height, picture.image.width), np.uint8)
    return _Upload(picture, everything, own_mask=True, unmasked=True)


def _empty_canvas(size: tuple[int, int] | None, max_pixels: int) -> DecodedImage:
    return DecodedImage(Image.new("RGB", _empty_size(size, max_pixels), (EMPTY_RGB,) * 3))


def _empty_size(size: tuple[int, int] | None, max_pixels: int) -> tuple[int, int]:
    if size is None:
        raise InvalidImageError(
            "Missing required parameter: 'image'.", param="image", code="missing_required_parameter"
        )
    check_pixels(size, "size", max_pixels)
    return size


# -------------------------------------------------------------------------------------------------------------- masks


def _read_mask(data: Bytes, kind: MaskKind, picture: DecodedImage, max_pixels: int) -> Bytes:
    field = "mask" if kind == "alpha" else "mask_image"
    mask = decode(data, field, max_pixels).image
    if kind == "alpha" and mask.mode != "RGBA":
        raise _bad_mask("mask image missing alpha channel; a black-and-white mask goes into 'mask_image'", field)
    if mask.size != picture.image.size:
        raise _bad_mask(_size_mismatch(mask.size, picture), field)
    keep = np.asarray(mask.getchannel("A")) if kind == "alpha" else _keep_of_values(mask, kind)
    if keep.min() == 255:
        selecting = "transparent (alpha 0)" if kind == "alpha" else "white"
        raise InvalidRequestError(f"Invalid '{field}': it selects nothing; make what to edit {selecting}.", param=field)
    return keep


def _size_mismatch(mask_size: Size, picture: DecodedImage) -> str:
    width, height = picture.image.size
    reason = f"mask size does not match image size ({mask_size[0]}x{mask_size[1]} and {width}x{height})"
    if picture.is_turned and mask_size == (height, width):
        reason += "; the image was turned upright, as its EXIF orientation says: draw the mask on what is seen"
    return reason


def _keep_of_values(mask: Image.Image, kind: MaskKind) -> Bytes:
    colours = mask.convert("RGB")  # transparency in a mask_image is ignored
    channels = {"red": "R", "green": "G", "blue": "B"}
    values = colours.getchannel(channels[kind]) if kind in channels else colours.convert("L")
    return np.where(np.asarray(values) >= 128, 0, 255).astype(np.uint8)


def _bad_mask(reason: str, field: str) -> InvalidImageError:
    return InvalidImageError(f"Invalid mask image format - {reason}", param=field, code="invalid_mask_image_format")


# ------------------------------------------------------------------------------------------------------------- pixels


def content_id(template: Bytes, *references: Bytes) -> str:
    """Hex SHA-256 of (format version, width, height, RGB bytes) of a template, uint8 [height, width, 3], and the same
    of each reference."""
    digest = hashlib.sha256()
    for picture in (template, *references):
        height, width, _ = picture.shape
        digest.update(struct.pack("<III", CONTENT_FORMAT, width, height))
        digest.update(np.ascontiguousarray(picture).data)
    return digest.hexdigest()


def paste_generated(canvas: Image.Image, pixels: Bytes, keep: Bytes, crop: Box | None = None) -> None:
    """Blend `pixels` (uint8 [height, width, 3]), scaled to the canvas (RGB or RGBA) or to its `crop`, into the canvas,
    unless a small mask's edge is so soft that nothing is left of it.

    Only the box around the mask is changed, and without a crop only that box is resized, so a small edit of a large
    photo costs little.
    """
    if keep.min() == 255:
        return
    box = left, top, right, bottom = edited_box(keep)
    painted, geometry = Image.fromarray(pixels), CropGeometry(canvas.size)
    if crop is None:
        generated = _scaled_part(painted, geometry, box)
    else:
        geometry = covering(painted.size, (crop[2] - crop[0], crop[3] - crop[1])).moved(crop[0], crop[1])
        generated = _part_of_scaled(painted, geometry, box)
    # Pillow's paste rounds (source * a + generated * (255 - a)) / 255 to the nearest integer, in every band.
    canvas.paste(generated.convert(canvas.mode), box, Image.fromarray(255 - keep[top:bottom, left:right]))


def _scaled_part(picture: Image.Image, geometry: CropGeometry, box: Box) -> Image.Image:
    """The part of a placed picture inside `box`; only this part is resized."""
    (width, height), (x, y) = geometry.size, geometry.offset
    across, down = picture.width / width, picture.height / height
    source = ((box[0] - x) * across, (box[1] - y) * down, (box[2] - x) * across, (box[3] - y) * down)
    return picture.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.LANCZOS, box=source)


def _part_of_scaled(picture: Image.Image, geometry: CropGeometry, box: Box) -> Image.Image:
    """As `_scaled_part`, but resizes the whole picture first, which gives diffusers' pixels. For a part, Pillow may
    scale rows before columns, with rounding and clipping between: a difference of 40 of 255 was measured where black
    meets white. A very thin crop would need an enormous picture: above MAX_COVER_PIXELS only the part is resized.
    """
    (width, height), (x, y) = geometry.size, geometry.offset
    if width * height > MAX_COVER_PIXELS:
        return _scaled_part(picture, geometry, box)
    resized = picture.resize(geometry.size, Image.Resampling.LANCZOS)
    return resized.crop((box[0] - x, box[1] - y, box[2] - x, box[3] - y))

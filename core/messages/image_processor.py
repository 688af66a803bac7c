"""Messages to an image processor, and its answers."""

from __future__ import annotations

from typing import Literal

from core.failure import Failure
from core.handles import ArrayRef
from core.messages.message import Message

MaskKind = Literal["alpha", "luminance"]  # alpha: transparent = edit (OpenAI's `mask`); luminance: >= 128 = edit
OutputFormat = Literal["png", "webp", "jpeg"]
Box = tuple[int, int, int, int]  # left, top, right, bottom; pixels


class PrepareImages(Message, frozen=True):
    """Decode and check an upload, make what the engine needs of it.

    image: encoded file bytes, uint8 [bytes]; None makes an empty canvas of `canvas_size`. mask: likewise; None takes
    the image's own transparency, or everything. padding_mask_crop: pixels of the upload; the mask's box with so many
    around it is what the engine sees, at the model's full area; None: it sees the whole. mask_margin: pixels of
    generation size. scratch: uint8 [bytes] to carve the results from; at least
    `engine.images.image_ops.scratch_bytes(native_size, token_size)`.
    """

    job_id: int
    image: ArrayRef | None
    mask: ArrayRef | None
    mask_kind: MaskKind
    canvas_size: tuple[int, int] | None  # (width, height)
    mask_margin: int
    native_size: int
    token_size: int
    max_pixels: int
    scratch: ArrayRef
    max_side: int | None = None  # tokens of the longest side, None for any
    padding_mask_crop: int | None = None


class PreparedImages(Message, frozen=True):
    """The answer to PrepareImages. All arrays lie in its scratch.

    template: uint8 [height, width, 3] RGB at generation size. mask: uint8 [height, width], 1 = edit. active: int32
    [active tokens], row-major token indices, ascending. content_id: hex digest of (format version, width, height, RGB).
    """

    job_id: int
    upload_width: int
    upload_height: int
    width: int
    height: int
    template: ArrayRef
    mask: ArrayRef
    active: ArrayRef
    content_id: str
    unmasked: bool  # no mask was given and the image is opaque: everything is regenerated
    crop: Box | None = None  # the part of the upload that all this is of, None: the whole


class ComposeImage(Message, frozen=True):
    """Paste generated pixels into the original upload under its mask and encode the result.

    pixels: uint8 [height, width, 3] at generation size. image, mask, mask_kind, canvas_size: as in PrepareImages. crop:
    of the answer to it.
    output_size: (width, height) to resize the composite to; None = upload size. compression: 0..100, jpeg and webp
    quality (100 = lossless for webp). out: uint8 [bytes] to write to, at least `engine.images.image_ops.encoded_bytes(...)`.
    """

    job_id: int
    pixels: ArrayRef
    image: ArrayRef | None
    mask: ArrayRef | None
    mask_kind: MaskKind
    canvas_size: tuple[int, int] | None
    output_size: tuple[int, int] | None
    output_format: OutputFormat
    compression: int
    base64: bool
    max_pixels: int
    out: ArrayRef
    crop: Box | None = None


class ComposedImage(Message, frozen=True):
    """The answer to ComposeImage: `encoded` is the written part of `out`, uint8 [bytes] (base64 text if asked).
    colour_lost: what the upload says of its colours and this file does not.
    """

    job_id: int
    encoded: ArrayRef
    width: int
    height: int
    colour_lost: tuple[str, ...] = ()


class JobFailed(Message, frozen=True):
    job_id: int
    failure: Failure


ToImageProcessor = PrepareImages | ComposeImage
FromImageProcessor = PreparedImages | ComposedImage | JobFailed

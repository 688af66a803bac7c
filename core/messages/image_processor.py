"""Messages to an image processor, and its answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from core.failure import Failure
from core.handles import ArrayRef
from core.messages.message import Message
from core.reference_pictures import ReferencePictures

MaskKind = Literal["alpha", "luminance", "red", "green", "blue", "own", "none"]
"""What selects what to edit. Of a mask's file, alpha: transparency (OpenAI's `mask`); luminance, red, green, blue: such
values of 128 and above. Without a file: the picture's own transparency, or if it has none, everything; own: a picture
without transparency is refused; none: everything, whatever its transparency.
"""
OutputFormat = Literal["png", "webp", "jpeg"]
Box = tuple[int, int, int, int]  # left, top, right, bottom; pixels


class CanvasScale(msgspec.Struct, frozen=True):
    """A further size at which an upload is prepared."""

    name: str  # of the canvas
    factor: float  # how many times smaller its sides are than those of the generation
    param: str  # the request's parameter that says so; "": none


class PrepareImages(Message, frozen=True):
    """Decode and check an upload, and make the engine's arrays from it. Set by the API server throughout."""

    job_id: int
    # The upload.
    image: ArrayRef | None  # encoded file, uint8 [bytes]; None: an empty canvas of `canvas_size`
    mask: ArrayRef | None  # encoded file, uint8 [bytes]; None: the image's own transparency, or everything
    mask_kind: MaskKind
    canvas_size: tuple[int, int] | None  # (width, height)
    # Of the edit and the model.
    mask_margin: int  # px of generation size
    native_size: int  # see ModelInfo
    token_size: int  # see ModelInfo
    max_pixels: int  # limit on the upload
    scratch: ArrayRef  # uint8 [bytes] for the results; at least engine.images.image_ops.scratch_bytes(...)
    max_side: int | None = None  # see ModelInfo
    # px of the upload around the mask's box: the engine sees this crop at the model's full area; None: the whole
    padding_mask_crop: int | None = None
    scales: tuple[CanvasScale, ...] = ()  # also make the arrays at these sizes
    # Of the mask, in px of the upload.
    mask_grow: int = 0  # what is edited is grown by this on each side, a square
    mask_feather: float = 0.0  # deviation of the Gaussian that softens its edge
    is_mask_sought: bool = False  # the engine finds the mask: the arrays are those of everything
    references: tuple[ArrayRef, ...] = ()  # further encoded files, uint8 [bytes], for a model that sees them
    reference_pictures: ReferencePictures | None = None  # see ModelInfo
    controls: tuple[ArrayRef, ...] = ()  # encoded files of control pictures, uint8 [bytes]

    @property
    def is_generation(self) -> bool:
        """Whether nothing is given that a picture could be made of."""
        return self.image is None and self.mask is None and self.padding_mask_crop is None


class PreparedCanvas(msgspec.Struct, frozen=True):
    """An upload at one more size, in the fields of PreparedImages."""

    width: int
    height: int
    template: ArrayRef | None
    mask: ArrayRef | None
    active: ArrayRef | None
    control_pictures: tuple[ArrayRef, ...] = ()


class PreparedImages(Message, frozen=True):
    """The answer to PrepareImages, set by the image processor. All arrays are in its scratch."""

    job_id: int
    # Sizes, px.
    upload_width: int
    upload_height: int
    width: int  # of generation
    height: int  # of generation
    # At generation size; None: nothing is given, and the API server has needed no image processor to say so.
    template: ArrayRef | None  # uint8 [height, width, 3], RGB
    mask: ArrayRef | None  # uint8 [height, width], 1 = edit
    active: ArrayRef | None  # int32 [active tokens], row-major token indices, ascending
    content_id: str  # hex digest of (format version, width, height, RGB), and with references of theirs
    # Facts about the upload.
    unmasked: bool  # no mask was given and the image is opaque: everything is regenerated
    crop: Box | None = None  # the part of the upload that the arrays show; None: the whole
    canvases: dict[str, PreparedCanvas] = msgspec.field(default_factory=dict)  # the same at further sizes, by name
    references: tuple[
        ArrayRef, ...
    ] = ()  # uint8 [height, width, 3] each, RGB, at the sizes at which the model sees them
    control_pictures: tuple[ArrayRef, ...] = ()  # uint8 [height, width, 3] each, RGB, at generation size


class ComposeImage(Message, frozen=True):
    """Paste generated pixels into the original upload under its mask and encode the result. Set by the API server."""

    job_id: int
    pixels: ArrayRef | None  # uint8 [height, width, 3] at generation size; None: make a file of the mask
    # The upload, as in PrepareImages.
    image: ArrayRef | None
    mask: ArrayRef | None
    mask_kind: MaskKind
    canvas_size: tuple[int, int] | None
    # The result.
    output_size: tuple[int, int] | None  # (width, height) to resize the composite to; None: the upload's size
    output_format: OutputFormat
    compression: int  # quality of jpeg and webp, 0..100; 100 is lossless for webp
    base64: bool
    max_pixels: int  # limit on the upload
    out: ArrayRef  # uint8 [bytes] for the file; at least engine.images.image_ops.encoded_bytes(...)
    crop: Box | None = None  # as in PreparedImages
    mask_grow: int = 0  # as in PrepareImages
    mask_feather: float = 0.0
    found: ArrayRef | None = None  # the mask that an engine has found, grown, uint8 [height, width], 1 = edit


class ComposedImage(Message, frozen=True):
    """The answer to ComposeImage."""

    job_id: int
    encoded: ArrayRef  # the written part of `out`, uint8 [bytes]; base64 text if that was asked for
    width: int
    height: int
    colour_lost: tuple[str, ...] = ()  # colour information of the upload that this file does not carry
    box: Box | None = None  # around all that was edited, in px of the upload


class JobFailed(Message, frozen=True):
    """The answer to a job that failed."""

    job_id: int
    failure: Failure


class ReadPicture(Message, frozen=True):
    """Decode a picture as it is, for a user's class. Set by the API server."""

    job_id: int
    file: ArrayRef  # encoded, uint8 [bytes]
    param: str  # the request's field that it came in
    max_pixels: int  # limit on uploads
    max_size: tuple[int, int]  # most (width, height) that is declared
    out: ArrayRef  # uint8 [bytes] for the pixels; at least those of max_size


class ReadPixels(Message, frozen=True):
    """The answer to ReadPicture."""

    job_id: int
    pixels: ArrayRef  # at the start of `out`, uint8 [height, width, 3], RGB


ToImageProcessor = PrepareImages | ReadPicture | ComposeImage
FromImageProcessor = PreparedImages | ReadPixels | ComposedImage | JobFailed

"""Control pictures at the sizes at which an edit is computed. Sizes are (width, height) in pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from core.errors import InvalidRequestError
from core.messages.image_processor import Box, PrepareImages
from engine.images.crop_geometry import CropGeometry, Size, fitted, lay
from engine.images.image_codec import Bytes, decode


def control_arrays(
    files: Iterable[Bytes], job: PrepareImages, upload_size: Size, crop: Box | None, sizes: Sequence[Size]
) -> list[list[Bytes]]:
    """For each of these sizes, every control picture, uint8 [height, width, 3]; resized as diffusers' pipelines do.
    files: uint8 [bytes] each. upload_size: of the picture that they go with. crop: the part of it that is edited; None:
    all. Raises InvalidImageError, and InvalidRequestError for one of other proportions.
    """
    pictures = [_part(decode(file, "control_image", job.max_pixels).image, upload_size, crop) for file in files]
    return [[_at(size, picture, job) for picture in pictures] for size in sizes]


def _part(picture: Image.Image, upload_size: Size, crop: Box | None) -> Image.Image:
    if not _are_alike(picture.size, upload_size):
        (width, height), (wanted_width, wanted_height) = picture.size, upload_size
        what = f"it has {width}x{height} pixels, and what it goes with {wanted_width}x{wanted_height}"
        message = f"Invalid 'control_image': {what}; give one of these proportions."
        raise InvalidRequestError(message, param="control_image")
    picture = picture.convert("RGB")
    if crop is None:
        return picture
    if picture.size != upload_size:
        picture = picture.resize(upload_size, Image.Resampling.LANCZOS)
    return picture.crop(crop)


def _are_alike(size: Size, other: Size) -> bool:
    """Whether one size is the other one, enlarged or reduced and rounded to whole pixels."""
    (width, height), (other_width, other_height) = size, other
    return abs(width * other_height - other_width * height) <= max(*size, *other)


def _at(size: Size, picture: Image.Image, job: PrepareImages) -> Bytes:
    geometry = CropGeometry(size) if job.padding_mask_crop is None else fitted(picture.size, size)
    return np.asarray(lay(picture, size, geometry))

"""Geometry of edits with `padding_mask_crop`: the crop of the upload, and how it is placed in the frame at generation
size and pasted back. As in diffusers' VaeImageProcessor, rounding included.

Sizes are (width, height), offsets (x, y), boxes (left, top, right, bottom), all in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from core.messages.image_processor import Box

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CropGeometry:
    """A picture scaled to `size`, with its upper left corner at `offset` in a frame. It may be smaller or larger than
    the frame."""

    size: Size
    offset: tuple[int, int] = (0, 0)

    def moved(self, x: int, y: int) -> CropGeometry:
        """The same, moved right by x and down by y."""
        return CropGeometry(self.size, (self.offset[0] + x, self.offset[1] + y))


def fitted(picture: Size, frame: Size) -> CropGeometry:
    """The whole picture, as large as fits into the frame, centred: diffusers' `_resize_and_fill`."""
    (width, height), (frame_width, frame_height) = picture, frame
    if frame_width / frame_height < width / height:
        return _centred((frame_width, max(1, height * frame_width // width)), frame)
    return _centred((max(1, width * frame_height // height), frame_height), frame)


def covering(picture: Size, frame: Size) -> CropGeometry:
    """The picture, as small as covers the frame, centred: diffusers' `_resize_and_crop`."""
    (width, height), (frame_width, frame_height) = picture, frame
    if frame_width / frame_height > width / height:
        return _centred((frame_width, height * frame_width // width), frame)
    return _centred((width * frame_height // height, frame_height), frame)


def _centred(size: Size, frame: Size) -> CropGeometry:
    return CropGeometry(size, (frame[0] // 2 - size[0] // 2, frame[1] // 2 - size[1] // 2))


def lay(picture: Image.Image, frame: Size, geometry: CropGeometry) -> Image.Image:
    """The picture resized (Lanczos) in a new frame; free space on two sides is filled by repeating its edges."""
    (width, height), (x, y) = geometry.size, geometry.offset
    resized = picture.resize(geometry.size, Image.Resampling.LANCZOS)
    if geometry.size == frame:
        return resized
    filled = Image.new(picture.mode, frame)
    filled.paste(resized, (x, y))
    if y > 0:
        filled.paste(resized.resize((width, y), box=(0, 0, width, 0)), (0, 0))
        filled.paste(resized.resize((width, y), box=(0, height, width, height)), (0, y + height))
    elif x > 0:
        filled.paste(resized.resize((x, height), box=(0, 0, 0, height)), (0, 0))
        filled.paste(resized.resize((x, height), box=(width, 0, width, height)), (x + width, 0))
    return filled


def crop_region(mask: Box, padding: int, picture: Size, frame: Size) -> Box:
    """The part of a picture that is edited: the mask's box, `padding` pixels larger on each side, widened to the aspect
    of `frame` within the picture: diffusers' `get_crop_region`.
    """
    (left, top, right, bottom), (width, height) = mask, picture
    left, right = max(left - padding, 0), min(right + padding, width)
    top, bottom = max(top - padding, 0), min(bottom + padding, height)
    aspect = frame[0] / frame[1]
    if (right - left) / (bottom - top) > aspect:
        top, bottom = _widened(top, bottom, int((right - left) / aspect - (bottom - top)), height)
    else:
        left, right = _widened(left, right, int((bottom - top) * aspect - (right - left)), width)
    return left, top, right, bottom


def _widened(start: int, end: int, more: int, limit: int) -> tuple[int, int]:
    """The range start..end made `more` pixels longer, equally on both sides, moved and cut to stay within 0..limit."""
    start -= more // 2
    end += more - more // 2
    start, end = start - max(0, end - limit), min(end, limit)
    end, start = end - min(0, start), max(0, start)
    return start, min(end, limit)

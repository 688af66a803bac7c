"""Where a picture lies in a frame: the region of an upload that an edit with `padding_mask_crop` sees, and the way
there and back. As diffusers' VaeImageProcessor does it, rounding included.

Sizes are (width, height), offsets (x, y), boxes (left, top, right, bottom), all in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from core.messages.image_processor import Box

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CropGeometry:
    """A picture scaled to `size`, with its upper left corner at `offset` of a frame, which it need not fill and may
    exceed."""

    size: Size
    offset: tuple[int, int] = (0, 0)

    def moved(self, x: int, y: int) -> CropGeometry:
        """The same, further right and down."""
        return CropGeometry(self.size, (self.offset[0] + x, self.offset[1] + y))


def fitted(picture: Size, frame: Size) -> CropGeometry:
    """All of the picture as large as the frame holds it, in its middle: `_resize_and_fill`."""
    (width, height), (frame_width, frame_height) = picture, frame
    if frame_width / frame_height < width / height:
        return _centred((frame_width, max(1, height * frame_width // width)), frame)
    return _centred((max(1, width * frame_height // height), frame_height), frame)


def covering(picture: Size, frame: Size) -> CropGeometry:
    """The picture as small as covers the frame, its middle in the frame's: `_resize_and_crop`."""
    (width, height), (frame_width, frame_height) = picture, frame
    if frame_width / frame_height > width / height:
        return _centred((frame_width, height * frame_width // width), frame)
    return _centred((width * frame_height // height, frame_height), frame)


def _centred(size: Size, frame: Size) -> CropGeometry:
    return CropGeometry(size, (frame[0] // 2 - size[0] // 2, frame[1] // 2 - size[1] // 2))


def lay(picture: Image.Image, frame: Size, geometry: CropGeometry) -> Image.Image:
    """The picture (Lanczos) in a frame of its own; what it leaves free on two sides repeats its edges."""
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
    """The part of a picture that is edited: the box of its mask, `padding` pixels larger on each side, and then widened
    to the aspect of `frame` as far as the picture reaches: `get_crop_region`.
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
    """`more` pixels more, equally on both sides, but within 0..limit."""
    start -= more // 2
    end += more - more // 2
    start, end = start - max(0, end - limit), min(end, limit)
    end, start = end - min(0, start), max(0, start)
    return start, min(end, limit)

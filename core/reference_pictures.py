"""ReferencePictures: which pictures beside the one to edit a model's denoiser sees, and at which sizes."""

from __future__ import annotations

import math

import msgspec

MAX_ASPECT = 200
"""Largest ratio of a reference's sides: that of Qwen2-VL's image processor."""


class ReferencePictures(msgspec.Struct, frozen=True, kw_only=True):
    """Each reference has condition tokens, at positions of its own. It keeps its aspect."""

    most: int  # of a request, beside the picture to edit
    pixels: int  # area of a reference
    multiple: int  # px; both sides are multiples of it
    grows: bool  # smaller pictures are enlarged to that area
    replaces_template: bool = False  # the denoiser sees no tokens of the template beside it

    @property
    def most_pixels(self) -> int:
        """Upper bound on the area of a `size`: of a picture of that aspect, both sides rounded up."""
        side = math.isqrt(self.pixels) + 1
        return side**2 + self.multiple * side * math.isqrt(MAX_ASPECT + 24) + self.multiple**2

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) at which the denoiser sees a picture of this size, at least one multiple each. The aspect is
        at most MAX_ASPECT."""
        if self.grows:
            ratio = width / height
            length = math.sqrt(self.pixels * ratio)
            sides = round(length / self.multiple), round(length / ratio / self.multiple)
        else:
            wide, high = self.shrunk(width, height)
            sides = wide // self.multiple, high // self.multiple
        return max(1, sides[0]) * self.multiple, max(1, sides[1]) * self.multiple

    def shrunk(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of a picture of this size, made smaller where its area is too large."""
        factor = math.sqrt(self.pixels / (width * height))
        return (width, height) if factor >= 1 else (max(1, int(width * factor)), max(1, int(height * factor)))

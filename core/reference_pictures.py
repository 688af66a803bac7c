"""ReferencePictures: which pictures beside the one to edit a model's denoiser sees, and at which sizes."""

from __future__ import annotations

import math

import msgspec


class ReferencePictures(msgspec.Struct, frozen=True, kw_only=True):
    """Each reference has condition tokens, at positions of its own. It keeps its aspect."""

    most: int  # of a request, beside the picture to edit
    pixels: int  # area of a reference
    multiple: int  # px; both sides are multiples of it
    grows: bool  # smaller pictures are enlarged to that area
    replaces_template: bool = False  # the denoiser sees no tokens of the template beside it

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) at which the denoiser sees a picture of this size, at least one multiple each."""
        shrink = math.sqrt(self.pixels / (width * height))
        if self.grows:
            ratio = width / height
            wide = math.sqrt(self.pixels * ratio)
            sides = round(wide / self.multiple), round(wide / ratio / self.multiple)
        else:
            fitted = (width, height) if shrink >= 1 else (int(width * shrink), int(height * shrink))
            sides = fitted[0] // self.multiple, fitted[1] // self.multiple
        return max(1, sides[0]) * self.multiple, max(1, sides[1]) * self.multiple

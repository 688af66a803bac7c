"""VisionTokens: how many tokens a picture has for a text encoder that sees it, as Qwen2-VL's image processor counts."""

from __future__ import annotations

import math

import msgspec

FITTED_SIDE = 32
"""Sides of pictures of a given area are multiples of this many pixels."""


class VisionTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the image processor. Pictures are resized to min_pixels..max_pixels pixels, after they were
    resized to `area`, if there is one."""

    side: int  # px of a token's side
    min_pixels: int
    max_pixels: int
    area: int = 0  # px; 0: pictures reach the processor at their own size
    frame_tokens: int = 0  # of the chat around each picture after the first

    def count(self, width: int, height: int) -> int:
        """Tokens of a picture of this size in pixels. Its sides must not differ by more than a factor of 200."""
        wide, high = self.size(width, height)
        return (wide // self.side) * (high // self.side)

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) at which the processor gets a picture: of about `area`, and with its ratio of sides;
        `calculate_dimensions` of diffusers/pipelines/qwenimage/pipeline_qwenimage_edit_plus.py."""
        if not self.area:
            return width, height
        ratio = width / height
        wide = math.sqrt(self.area * ratio)
        high = wide / ratio
        return round(wide / FITTED_SIDE) * FITTED_SIDE, round(high / FITTED_SIDE) * FITTED_SIDE

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) to which a picture is resized; transformers' smart_resize, after `fitted`."""
        width, height = self.fitted(width, height)
        wide, high = (round(length / self.side) * self.side for length in (width, height))
        if wide * high > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            wide, high = (max(1, math.floor(n / shrink / self.side)) * self.side for n in (width, height))
        elif wide * high < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            wide, high = (math.ceil(n * grow / self.side) * self.side for n in (width, height))
        return wide, high

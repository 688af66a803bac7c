"""MaskRequest: a mask as callers ask for it, by words, points or a box, in pixels of their picture."""

from __future__ import annotations

import math

import msgspec

from core.errors import InvalidRequestError
from core.selection import MAX_POINTS, MAX_WORDS, Point, Selection
from core.validation import check_filled, check_length, conform

MAX_GROW = 1024  # px
MAX_FEATHER = 256  # px
SOFT_REACH = 2
"""Deviations of the Gaussian beyond which a softened edge hardly blends anything, so nothing is computed there."""

PixelPoint = tuple[float, ...]
"""x and y in pixels from the left and the top; and a sign: 1 if what is there belongs to the mask, as without it, or -1
if it does not."""


class MaskRequest(msgspec.Struct, frozen=True, kw_only=True):
    """At least one of the three. Raises InvalidRequestError that names the field at fault: mask_prompt, mask_points or
    mask_box."""

    prompt: str | None = None  # 1..MAX_WORDS characters
    points: tuple[PixelPoint, ...] = ()  # at most MAX_POINTS
    box: tuple[float, float, float, float] | None = None  # left, top, right, bottom

    def __post_init__(self) -> None:
        conform(self)
        if self.prompt is not None:
            check_filled("mask_prompt", self.prompt.strip())
            check_length("mask_prompt", self.prompt, MAX_WORDS)
        if len(self.points) > MAX_POINTS:
            what = f"array too long. Expected at most {MAX_POINTS} points, but got {len(self.points)}"
            message = f"Invalid 'mask_points': {what}."
            raise InvalidRequestError(message, param="mask_points", code="array_above_max_length")
        if any(len(point) not in (2, 3) for point in self.points):
            raise _invalid("mask_points", "a point is x, y and, if it is to be left out, the sign -1")
        if any(_sign(point) not in (1, -1) for point in self.points):
            raise _invalid("mask_points", "a sign is 1, for what belongs to the mask, or -1")
        if self.points and all(_sign(point) < 0 for point in self.points) and self.prompt is None and not self.box:
            raise _invalid("mask_points", "none has the sign 1, and there is neither a mask_prompt nor a mask_box")
        if self.box is not None:
            left, top, right, bottom = self.box
            if not (left < right and top < bottom):
                raise _invalid("mask_box", "it is empty; give left, top, right, bottom with left < right, top < bottom")

    def within(self, width: int, height: int) -> Selection:
        """The same for a picture of this size in pixels. Raises InvalidRequestError for what is outside of it."""
        size = f"the picture, which has {width}x{height} pixels"
        for point in self.points:
            if not (_is_within(point[0], width) and _is_within(point[1], height)):
                raise _invalid("mask_points", f"({point[0]:g}, {point[1]:g}) is outside {size}")
        if self.box is not None and not all(
            _is_within(value, side) for value, side in zip(self.box, (width, height) * 2, strict=True)
        ):
            raise _invalid("mask_box", f"({', '.join(f'{value:g}' for value in self.box)}) is not within {size}")
        return Selection(
            words=self.prompt or "",
            points=tuple(Point(point[0] / width, point[1] / height, _sign(point) > 0) for point in self.points),
            box=None
            if self.box is None
            else (self.box[0] / width, self.box[1] / height, self.box[2] / width, self.box[3] / height),
        )


def mask_request(
    prompt: str | None = None,
    points: tuple[PixelPoint, ...] = (),
    box: tuple[float, float, float, float] | None = None,
) -> MaskRequest | None:
    """What these fields of a request ask for; None: nothing."""
    if prompt is None and not points and box is None:
        return None
    return MaskRequest(prompt=prompt, points=points, box=box)


def _sign(point: PixelPoint) -> float:
    return point[2] if len(point) == 3 else 1


def _is_within(value: float, side: int) -> bool:
    return math.isfinite(value) and 0 <= value <= side


def _invalid(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{name}': {why}.", param=name)

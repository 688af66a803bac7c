"""The sizes at which pictures are edited: (width, height) in pixels, multiples of the model's token size."""

from __future__ import annotations

import numpy as np

from core.errors import InvalidRequestError
from core.messages.image_processor import CanvasScale
from engine.images.crop_geometry import Size

MIN_SIDE_TOKENS = 2
"""Fewest tokens on each side of a smaller canvas."""


def generation_size(width: int, height: int, native_size: int, token_size: int, max_side: int | None = None) -> Size:
    """The size at which a picture is edited: multiples of token_size, area at most native_size squared, no side longer
    than max_side tokens.

    Both sides are rounded to the nearest multiple (at least one) if that fits. Otherwise it is the size nearest to the
    picture scaled to the full area, by the logarithms of both sides, so that aspect and area count equally.
    """
    columns, rows = (max(1, (side + token_size // 2) // token_size) for side in (width, height))
    if columns * rows > (native_size // token_size) ** 2:
        return crop_size(width, height, native_size, token_size, max_side)
    return _within(columns, rows, width, height, token_size, max_side)


def crop_size(width: int, height: int, native_size: int, token_size: int, max_side: int | None = None) -> Size:
    """The size at which a crop of a width x height picture is edited: the picture's aspect at the model's full area,
    also for small pictures."""
    columns, rows = _nearest_grid(width / height, (native_size // token_size) ** 2)
    return _within(columns, rows, width, height, token_size, max_side)


def _within(columns: int, rows: int, width: int, height: int, token_size: int, max_side: int | None) -> Size:
    if max_side is not None and max(columns, rows) > max_side:
        longest = max(width, height)
        columns, rows = (max(1, round(max_side * side / longest)) for side in (width, height))
    return columns * token_size, rows * token_size


def smaller_size(size: Size, token_size: int, scale: CanvasScale) -> Size:
    """The size of a smaller canvas: each side of the generation, `size`, divided by the factor and rounded to a
    multiple of token_size. Raises InvalidRequestError if a side has less than MIN_SIDE_TOKENS tokens.
    """
    columns, rows = (int(side / (token_size * scale.factor) + 0.5) for side in size)
    if min(columns, rows) < MIN_SIDE_TOKENS:
        least, param = MIN_SIDE_TOKENS * token_size, scale.param or "size"
        remedy = "give a larger picture" + (f", or a smaller {scale.param}, or none" if scale.param else "")
        message = (
            f"Invalid '{param}': {scale.factor:g} leaves too little of {size[0]}x{size[1]} pixels for the {scale.name} "
            f"pass, whose sides need {least} pixels; {remedy}."
        )
        raise InvalidRequestError(message, param=param)
    return columns * token_size, rows * token_size


def _nearest_grid(aspect: float, limit: int) -> tuple[int, int]:
    """(columns, rows) with columns * rows <= limit, nearest to an exact grid of `limit` tokens and this aspect."""
    columns = np.arange(1, limit + 1)
    best_columns, best_rows = (limit * aspect) ** 0.5, (limit / aspect) ** 0.5
    rows = np.stack([np.minimum(max(1, side), limit // columns) for side in (int(best_rows), int(best_rows) + 1)])
    distance = np.log(columns / best_columns) ** 2 + np.log(rows / best_rows) ** 2
    row, column = np.unravel_index(distance.argmin(), distance.shape)
    return int(columns[column]), int(rows[row, column])

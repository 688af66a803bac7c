"""Tokens of masks of a given size, in different places: an edit's mask is never that of the edit before it."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor

from model_executor.models.boxes import Box, cut

STRIDE_DOWN, STRIDE_ACROSS = 7, 11
"""Distance of the places of boxes, in tokens, before they are wrapped to the room that a box leaves."""


def box_tokens(number: int, side: int, device: torch.device, place: int = 0) -> Tensor:
    """Ascending indices (int64) of `number` > 0 tokens of a side * side picture: a box whose last row may be short.
    place: 0 in the upper left corner; other numbers are other places and other proportions."""
    rows = min(side, max(1, ceil(sqrt(number)) + place % 3))
    columns = ceil(number / rows)
    top, left = _corner(place, side - rows, side - columns)
    down, across = (top + torch.arange(rows))[:, None] * side, left + torch.arange(columns)
    return (down + across).flatten()[:number].to(device)


def tokens_in(box: Box, side: int, device: torch.device) -> Tensor:
    """Indices in a square picture of side * side tokens."""
    return cut(torch.arange(side * side, device=device).view(side, side), box).flatten()


def middle_box(ratio: float, side: int) -> Box:
    """A box in the middle of a square picture of side * side tokens, with about this share of them."""
    width, height = _sides(ratio, side)
    left, top = (side - width) // 2, (side - height) // 2
    return left, top, left + width, top + height


def box_at(place: int, ratio: float, side: int) -> Box:
    """A box as large as `middle_box`, in another place for every number up to some tens."""
    width, height = _sides(ratio, side)
    top, left = _corner(place, side - height, side - width)
    return left, top, left + width, top + height


def _sides(ratio: float, side: int) -> tuple[int, int]:
    height = max(1, round(ratio**0.5 * side))
    return max(1, round(ratio * side * side / height)), height


def _corner(place: int, room_down: int, room_across: int) -> tuple[int, int]:
    return place * STRIDE_DOWN % (room_down + 1), place * STRIDE_ACROSS % (room_across + 1)

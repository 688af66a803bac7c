"""Tokens of masks of a given size."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor

from model_executor.models.boxes import Box, cut


def box_tokens(number: int, side: int, device: torch.device) -> Tensor:
    """Ascending indices (int64) of `number` > 0 tokens of a side * side picture: a box whose last row may be short."""
    rows = min(side, ceil(sqrt(number)))
    columns = ceil(number / rows)
    down, across = torch.arange(rows)[:, None] * side, torch.arange(columns)
    return (down + across).flatten()[:number].to(device)


def tokens_in(box: Box, side: int, device: torch.device) -> Tensor:
    """Indices in a square picture of side * side tokens."""
    return cut(torch.arange(side * side, device=device).view(side, side), box).flatten()


def middle_box(ratio: float, side: int) -> Box:
    """In the middle of a square picture of side * side tokens, with about this share of them."""
    height = max(1, round(ratio**0.5 * side))
    width = max(1, round(ratio * side * side / height))
    left, top = (side - width) // 2, (side - height) // 2
    return left, top, left + width, top + height

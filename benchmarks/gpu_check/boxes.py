"""Which tokens a mask of some size touches."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor


def box_tokens(number: int, side: int, device: torch.device) -> Tensor:
    """Indices of so many tokens (> 0) of a picture of side * side: int64, ascending, an upright box whose last row may
    be cut short.
    """
    rows = min(side, ceil(sqrt(number)))
    columns = ceil(number / rows)
    down, across = torch.arange(rows)[:, None] * side, torch.arange(columns)
    return (down + across).flatten()[:number].to(device)

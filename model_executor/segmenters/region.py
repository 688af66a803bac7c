"""Pools a region of a feature map."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor


def pool_region(features: Tensor, box: Tensor, size: int) -> Tensor:
    """The means of `size` by `size` bins of a box, [1, width, size, size], as torchvision's `roi_align` computes them
    by default: each of as many samples as it has features. features: [1, width, height, width]. box: [4], its middle
    and size as shares of the sides; within 0..1.
    """
    x, y, width, height = box.tolist()
    rows, rows_per_bin = _samples(y, height, features.shape[-2], size)
    columns, columns_per_bin = _samples(x, width, features.shape[-1], size)
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)[None].to(features.device)
    sampled = torch.nn.functional.grid_sample(features.float(), grid, padding_mode="border", align_corners=True)
    return torch.nn.functional.avg_pool2d(sampled, (rows_per_bin, columns_per_bin)).to(features.dtype)


def _samples(middle: float, length: float, num_features: int, size: int) -> tuple[Tensor, int]:
    """Samples along one side: (their places, -1 for the first feature and 1 for the last one; how many a bin has)."""
    first, extent = (middle - length / 2) * num_features, max(length * num_features, 1.0)
    per_bin = ceil(extent / size)
    places = first + (torch.arange(size * per_bin) + 0.5) * extent / (size * per_bin)
    return 2 * places / max(num_features - 1, 1) - 1, per_bin

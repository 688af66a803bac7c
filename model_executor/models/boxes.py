"""Axis-aligned boxes of tokens or pixels: around active tokens, scaled, grown, and cut out of feature maps."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

Box = tuple[int, int, int, int]
"""left, top, right, bottom; right and bottom are exclusive."""

Size = tuple[int, int]
"""(rows, columns) of a map."""


def around(tokens: Tensor, columns: int) -> Box:
    """The box, in tokens, around token indices of a picture with `columns` tokens per row. Waits for a GPU that holds
    them."""
    (first, last), (left, right) = torch.aminmax(tokens), torch.aminmax(tokens % columns)
    return int(left), int(first) // columns, int(right) + 1, int(last) // columns + 1


def times(box: Box, factor: int) -> Box:
    """The same box in units that are `factor` times smaller."""
    left, top, right, bottom = box
    return left * factor, top * factor, right * factor, bottom * factor


def grown(box: Box, by: int, size: Size) -> Box:
    """The box enlarged by `by` on every side, within a map of this size."""
    left, top, right, bottom = box
    return max(left - by, 0), max(top - by, 0), min(right + by, size[1]), min(bottom + by, size[0])


def share(box: Box, size: Size) -> float:
    """The share of a map of this size that the box covers, 0..1."""
    left, top, right, bottom = box
    return (right - left) * (bottom - top) / prod(size)


def cut(x: Tensor, box: Box) -> Tensor:
    """A view of the box in a map x, [..., rows, columns]."""
    left, top, right, bottom = box
    return x[..., top:bottom, left:right]


def inside(box: Box, size: Size, device: torch.device) -> Tensor:
    """Which pixels of a map lie in the box: bool [rows, columns], made on the device."""
    left, top, right, bottom = box
    rows, columns = (torch.arange(number, device=device) for number in size)
    return ((rows >= top) & (rows < bottom))[:, None] & ((columns >= left) & (columns < right))


@dataclass(frozen=True, slots=True)
class Window:
    """A box of a feature map that is computed apart from the rest."""

    box: Box  # in pixels of the map
    size: Size  # the map's
    share: Tensor  # float32 [], the share of the map that the box covers
    edge: Tensor  # bool [rows + 2, columns + 2], which pixels of the box and its border of one lie on the map

    @classmethod
    def on(cls, box: Box, size: Size, device: torch.device) -> Window:
        left, top, right, bottom = box
        around_it = (1 - left, 1 - top, size[1] - left + 1, size[0] - top + 1)  # the map, relative to the border
        edge = inside(around_it, (bottom - top + 2, right - left + 2), device)
        return cls(box, size, torch.full([], share(box, size), device=device), edge)

    def cut(self, x: Tensor) -> Tensor:
        """The box of a map x, as a view."""
        return cut(x, self.box)

    def cut_grown(self, x: Tensor, by: int) -> Tensor:
        """The box and `by` pixels around it, with zeros beyond the map."""
        inner = grown(self.box, by, self.size)
        return F.pad(cut(x, inner), self._beyond(inner, by))

    def cut_grown_twice_as_large(self, x: Tensor, by: int) -> Tensor:
        """`cut_grown` of x enlarged to twice its size by repetition, of which only the part needed is enlarged."""
        left, top, right, bottom = inner = grown(self.box, by, self.size)
        small = (left // 2, top // 2, -(-right // 2), -(-bottom // 2))
        large = F.interpolate(cut(x, small), scale_factor=2.0, mode="nearest")
        first = 2 * small[0], 2 * small[1]
        shifted = (left - first[0], top - first[1], right - first[0], bottom - first[1])
        return F.pad(cut(large, shifted), self._beyond(inner, by))

    def _beyond(self, inner: Box, by: int) -> list[int]:
        """Pixels by which the grown box extends beyond the map: left, right, top and bottom."""
        left, top, right, bottom = self.box
        return [inner[0] - left + by, right + by - inner[2], inner[1] - top + by, bottom + by - inner[3]]

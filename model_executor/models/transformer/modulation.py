"""Modulation: the shifts, scales and gates of adaptive norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from model_executor.kernels.linear_groups import MakeGroup
from model_executor.kernels.low_rank import Segments


class Modulation:
    """A block's shifts, scales and gates, computed as one product of few rows with many weights.

    There is one per block, or one for several that share its layers, and not one for all, because a product's bits may
    depend on its number of columns, and a pass over some blocks must give the same bits as a pass over all.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        scales: Sequence[int],
        group: MakeGroup,
        *,
        num_parts: int | None = None,
        gates: Sequence[int] = (),
        weights: Sequence[Tensor] = (),
    ) -> None:
        """layers: the linear ones of adaptive norms that read the same conditioning. scales: which of their parts are
        scales. num_parts: None: parts are as wide as what the layers read. gates: which parts are put through tanh.
        weights: [hidden] each, by which the parts are multiplied at last; none: they are not."""
        self._group, self._scales, self._gates, self._weights = group(*layers), scales, gates, weights
        self.width = sum(layer.out_features for layer in layers)
        self._num_parts = num_parts or self.width // layers[0].in_features

    def product(self, conditioning: Tensor, where: Segments = ()) -> Tensor:
        """conditioning: [levels, width of what the layers read] -> [levels, width], with all done that is done to its
        parts. A level's bits do not depend on the other levels. where: the rows that patches change."""
        product = self._group(conditioning, where)
        parts = self.parts(product)
        for index in self._scales:
            parts[index].add_(1)
        for index in self._gates:
            parts[index].tanh_()
        for part, weight in zip(parts, self._weights, strict=False):
            part.mul_(weight)
        return product

    def parts(self, product: Tensor) -> Sequence[Tensor]:
        """[modulated spans, width] -> parts of [modulated spans, hidden], in the order of the norms."""
        parts: Sequence[Tensor] = product.chunk(self._num_parts, dim=1)
        return parts

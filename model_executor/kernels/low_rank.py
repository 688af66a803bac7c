"""Low-rank additions to the outputs of linear layers, for some of the rows of a batch.

An addition is x times `down` times `up`, with a rank of some tens. The rows of one matrix may have different ones, or
none: each is computed for its own rows alone, so that a row's bits depend on that row and its additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from model_executor.kernels.cpu_kernels import LANES, PANEL, AddedProduct, Kernels, pack
from model_executor.kernels.ragged import Span


@dataclass(frozen=True, slots=True)
class LowRank:
    """An addition to a layer's output: x [rows, in] times `down` [rank, in] transposed, times `up` [out, rank]
    transposed. For a convolution, `in` is channels * kernel pixels.
    """

    down: Tensor
    up: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        """The same in another place or precision."""
        return LowRank(self.down.to(device, dtype), self.up.to(device, dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive rows of a matrix that a patch changes."""

    patch: str  # its id
    rows: Span
    scale: Tensor | None  # of each of them, float32 [rows]; None: 1

    def scale_of(self, rows: Span) -> Tensor | None:
        """The scale of some of its rows."""
        first = self.rows[0]
        return None if self.scale is None else self.scale[rows[0] - first : rows[1] - first]


Segments = tuple[Segment, ...]
"""In an order of the patches that does not depend on the batch: in it, a row's additions are summed up."""


def runs(num_rows: int, segments: Segments) -> Iterator[tuple[Span, Segments]]:
    """Cuts all rows into the longest runs with the same segments."""
    ends = {0, num_rows, *(end for segment in segments for end in segment.rows)}
    for start, stop in pairwise(sorted(ends)):
        yield (start, stop), tuple(each for each in segments if each.rows[0] <= start and stop <= each.rows[1])


class AddedProducts:
    """A patch's addition to a group of layers, computed by matrix products of their own."""

    def __init__(
        self,
        lows: Sequence[LowRank | None],
        outputs: Sequence[int],
        make_product: Callable[[nn.Linear], Callable[[Tensor], Tensor]],
    ) -> None:
        """lows: for each layer of the group, None for nothing. outputs: of each layer. make_product: makes the product
        of a layer without bias."""
        there = [low for low in lows if low is not None]
        columns = [span for span, low in zip(pairwise([0, *accumulate(outputs)]), lows, strict=True) if low is not None]
        ranks = pairwise([0, *accumulate(len(low.down) for low in there)])
        self._down = make_product(_linear(torch.cat([low.down for low in there])))
        self._ups = [
            (slice(*rank), slice(*span), make_product(_linear(low.up)))
            for rank, span, low in zip(ranks, columns, there, strict=True)
        ]

    def add_(self, y: Tensor, x: Tensor, scale: Tensor | None) -> None:
        """y [rows, sum of out] plus the addition for x [rows, in], in place. scale: of each row, float32; None: 1."""
        inner = self._down(x)
        inner = inner if scale is None else (inner * scale[:, None]).to(x.dtype)  # the scale itself is not rounded
        for rank, columns, up in self._ups:
            y[:, columns] += up(inner[:, rank])


class AddedPanels:
    """A patch's addition to a group of layers, which our compiled kernels compute together with the group's product,
    while its outputs are in the first-level cache."""

    def __init__(self, lows: Sequence[LowRank | None], outputs: Sequence[int]) -> None:
        """lows, outputs: as for `AddedProducts`; in float32 the sum of outputs is a multiple of PANEL."""
        if any(number % PANEL for number in outputs):  # a panel would belong to two layers
            lows, outputs = (_as_one(lows, outputs),), (sum(outputs),)
        there = [low for low in lows if low is not None]
        depth = max(len(low.down) for low in there)
        step = -(-depth // LANES) * LANES  # numbers of the low-rank product for each layer
        self._down = pack(torch.cat([_lengthened(low.down, step) for low in there]), LANES)
        up, columns, first = [], list[int](), 0
        for low, number in zip(lows, outputs, strict=True):
            up.append(torch.zeros(number, depth) if low is None else _lengthened(low.up.float().T, depth).T)
            columns += [-1 if low is None else first] * -(-number // PANEL)
            first += 0 if low is None else step
        self._up, self._columns = pack(torch.cat(up)), torch.tensor(columns, dtype=torch.int32)

    def low(self, kernels: Kernels, x: Tensor, scale: Tensor | None) -> Tensor:
        """The low-rank product of x [rows, in]. scale: of each row, float32; None: 1."""
        return kernels.narrow_linear(x, self._down, scale)

    def of(self, low: Tensor) -> AddedProduct:
        """What to add to the rows that `low` is the low-rank product of."""
        return AddedProduct(low, self._up, self._columns)


def _as_one(lows: Sequence[LowRank | None], outputs: Sequence[int]) -> LowRank:
    """The additions to several layers as one to all of their outputs."""
    ups = [torch.empty(number, 0) if low is None else low.up for low, number in zip(lows, outputs, strict=True)]
    return LowRank(torch.cat([low.down for low in lows if low is not None]), torch.block_diag(*ups))


def _lengthened(x: Tensor, rows: int) -> Tensor:
    """x with rows of zeros added."""
    return nn.functional.pad(x, (0, 0, 0, rows - len(x)))


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return linear

"""Residuals: what ControlNets add to the blocks of one step, for all rows of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOTHING = -1
"""In place of a tensor's number: nothing is added."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """Blocks may add the same tensor, which is there once."""

    places: tuple[int, ...]  # number of a block -> number of the tensor that it adds, or NOTHING
    made: Iterable[Sequence[Tensor]]  # [rows, ...] each, see `Streamed`; some at a time, and perhaps not before

    def __add__(self, other: Residuals) -> Residuals:
        """What both add together. What this one adds is made first."""
        pairs = list(zip(self.places, other.places, strict=True))
        distinct = dict.fromkeys(pair for pair in pairs if pair != (NOTHING, NOTHING))
        numbers = {pair: number for number, pair in enumerate(distinct)}
        places = tuple(numbers.get(pair, NOTHING) for pair in pairs)
        return Residuals(places, self._sums(other, list(distinct)))

    def _sums(self, other: Residuals, pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[Tensor]]:
        mine, its, done = [tensor for some in self.made for tensor in some], list[Tensor](), 0
        for some in other.made:
            its += some
            end = next((at for at, (_, number) in enumerate(pairs) if number >= len(its)), len(pairs))
            yield [_sum(mine, its, *pair) for pair in pairs[done:end]]
            done = end

    @property
    def series(self) -> Iterator[Sequence[Tensor]]:
        """The same as a value of the tensor store, some tensors at a time. The places come first. They stay in
        host memory, because steps read them there."""
        first: Sequence[Tensor] = (torch.tensor(self.places, dtype=torch.int64),)
        for some in self.made:
            yield (*first, *some)
            first = ()


def _sum(mine: Sequence[Tensor], its: Sequence[Tensor], one: int, other: int) -> Tensor:
    if NOTHING in (one, other):
        return its[other] if one == NOTHING else mine[one]
    return mine[one] + its[other]


def added_to(series: Callable[[int], Tensor], row: int, block: int) -> Tensor | None:
    """What is added to a block of one row of the request. series: number -> the tensor of `Residuals.series`."""
    place = int(series(0)[block])
    return None if place == NOTHING else series(1 + place)[row]

"""Residuals: what ControlNets add to the blocks of one step, for all rows of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model_executor.models.base import Streamed

NOTHING = -1
"""In place of a tensor's number: nothing is added."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """Blocks may add the same tensor, which is there once."""

    places: tuple[int, ...]  # number of a block -> number of the tensor that it adds, or NOTHING
    tensors: tuple[Tensor, ...]  # [rows, ...] each, see `Streamed`

    def __add__(self, other: Residuals) -> Residuals:
        """What both add together."""
        pairs = list(zip(self.places, other.places, strict=True))
        distinct = dict.fromkeys(pair for pair in pairs if pair != (NOTHING, NOTHING))
        numbers = {pair: number for number, pair in enumerate(distinct)}
        sums = tuple(self._sum(other, *pair) for pair in numbers)
        return Residuals(tuple(numbers.get(pair, NOTHING) for pair in pairs), sums)

    def _sum(self, other: Residuals, mine: int, its: int) -> Tensor:
        if NOTHING in (mine, its):
            return other.tensors[its] if mine == NOTHING else self.tensors[mine]
        return self.tensors[mine] + other.tensors[its]

    def of_row(self, row: int) -> Streamed:
        """What they add for one row of the request."""
        return partial(self._at, row)

    def _at(self, row: int, block: int) -> Tensor | None:
        place = self.places[block]
        return None if place == NOTHING else self.tensors[place][row]

    @property
    def series(self) -> tuple[Tensor, ...]:
        """The same as a value of the tensor store. The places stay in host memory, where steps read them."""
        return torch.tensor(self.places), *self.tensors

    @classmethod
    def of_series(cls, series: Sequence[Tensor]) -> Residuals | None:
        """The reverse of `series`; None of an empty one, where nothing is added."""
        return cls(tuple(series[0].tolist()), tuple(series[1:])) if series else None

"""Last: keeps what was made last, since it is often asked for again at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor


class Key(Protocol):
    """What a value depends on."""

    def equals(self, other: Self) -> bool:
        """Whether the values of both are equal."""

    def copy(self) -> Self:
        """One that stays as it is when the memory of this one's tensors is used for something else."""


K = TypeVar("K", bound=Key)
V = TypeVar("V")


class Last(Generic[K, V]):
    """The value of the last key. One thread uses it."""

    def __init__(self) -> None:
        self._last: tuple[K, V] | None = None

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of this key, kept or else made by `make`, and then kept instead of the last one. It is shared with
        later calls and must not be modified."""
        if self._last is not None and self._last[0].equals(key):
            return self._last[1]
        self._last = None  # free its memory first
        value = make()
        self._last = key.copy(), value
        return value


def are_equal(mine: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether both are tensors of one device and dtype with equal numbers, or None."""
    if mine is None or theirs is None:
        return mine is theirs
    return mine.device == theirs.device and mine.dtype == theirs.dtype and torch.equal(mine, theirs)

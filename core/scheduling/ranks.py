"""Ranks: what is known of each worker of an engine, from what the workers have said."""

from __future__ import annotations

from collections.abc import Iterable

from core.costs.load_report import RankStats
from core.handles import LoadedComponent

Loaded = tuple[int, Iterable[LoadedComponent]]
"""(rank, the components that it has loaded)."""


class Ranks:
    """Owned by one scheduler."""

    def __init__(self, num_ranks: int) -> None:
        self._resident: list[tuple[LoadedComponent, ...]] = [()] * num_ranks
        self._busy_seconds = [0.0] * num_ranks

    def note_loaded(self, rank: int, components: Iterable[LoadedComponent]) -> None:
        """Note the components that a worker has loaded."""
        self._resident[rank] = tuple(components)

    def note_answer(self, rank: int, seconds: float) -> None:
        """Note worker time spent on a batch."""
        self._busy_seconds[rank] += seconds

    def stats(self) -> tuple[RankStats, ...]:
        """By rank."""
        pairs = zip(self._resident, self._busy_seconds, strict=True)
        return tuple(RankStats(resident, seconds) for resident, seconds in pairs)

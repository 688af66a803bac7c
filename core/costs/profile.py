"""Profile: the latency tables of one kind of work, which follow drifts of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from core.costs.latency_table import LatencyTable
from core.graph.work import Work

FORGET = 0.98
"""Weight of what was observed before, after each new observation: a drift is followed within a hundred batches."""

MOST = 2.0
"""A batch counts as at most this many times faster or slower than predicted: one that was preempted shows little."""


class Profile:
    """Predicts from tables. All measured latencies are stretched alike by what batches have taken since. While there
    was none, they are by what those of the same work on other numbers of ranks have taken: the machine is the same.
    """

    def __init__(self, exact: LatencyTable, masked: Mapping[int, LatencyTable] | None = None) -> None:
        """exact: of rows that compute all of their tokens. masked: tokens of a row -> table of rows that have so many
        and compute some of them."""
        self._exact, self._masked = exact, dict(masked or {})
        self.largest = min(table.largest for table in (exact, *self._masked.values()))
        """The largest number of rows that was measured at every size."""
        self.stretch = 1.0
        """Actual time of batches, as a multiple of the tables'."""
        self.kin: list[Profile] = []
        """The profiles of the same work on any number of ranks."""
        self._is_observed = False

    def seconds(self, work: Work) -> float | None:
        """Predicted time of a batch; None for one outside of what was measured."""
        measured = self._measured(work)
        return None if measured is None else measured * (self.stretch if self._is_observed else self._usual_stretch)

    @property
    def _usual_stretch(self) -> float:
        observed = [each.stretch for each in self.kin if each._is_observed]
        return sum(observed) / len(observed) if observed else self.stretch

    def observe(self, work: Work, seconds: float) -> None:
        """Note how long a batch has taken."""
        measured = self._measured(work)
        if measured is not None:
            ratio = min(max(seconds / measured, self.stretch / MOST), self.stretch * MOST)
            self._is_observed = True
            self.stretch = FORGET * self.stretch + (1 - FORGET) * ratio

    def _measured(self, work: Work) -> float | None:
        rows = len(work.queries)
        if not rows:
            return None
        table = self._exact if work.queries == work.keys else self._masked.get(round(sum(work.keys) / rows))
        return None if table is None else table.seconds(rows, sum(work.queries) / rows)


def profile_of(measured: Iterable[tuple[Work, float]]) -> Profile | None:
    """The profile of one kind of work, from batches and their seconds; None without one of rows that compute all of
    their tokens. In a batch all rows are alike. Raises ValueError for a size or time that is not above 0.
    """
    exact: list[tuple[int, float, float]] = []
    by_keys: dict[int, list[tuple[int, float, float]]] = {}
    for work, seconds in measured:
        rows, queries, keys = len(work.queries), work.queries[0], work.keys[0]
        by_keys.setdefault(keys, []).append((rows, queries, seconds))
        if queries == keys:
            exact.append((rows, queries, seconds))
    masked = {keys: points for keys, points in by_keys.items() if any(queries < keys for _, queries, _ in points)}
    if not exact:
        return None
    return Profile(LatencyTable(exact), {keys: LatencyTable(points) for keys, points in masked.items()})

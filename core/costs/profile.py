"""Profile: the latency table of one kind of work, which follows drifts of the machine."""

from __future__ import annotations

from core.costs.latency_table import LatencyTable
from core.graph.work import Work

FORGET = 0.98
"""Weight of what was observed before, after each new observation: a drift is followed within a hundred batches."""

MOST = 2.0
"""A batch counts as at most this many times faster or slower than predicted: one that was preempted shows little."""


class Profile:
    """Predicts from a table. All measured latencies are stretched alike by what batches have taken since."""

    def __init__(self, table: LatencyTable) -> None:
        self.table = table
        self.stretch = 1.0
        """Actual time of batches, as a multiple of the table's."""

    def seconds(self, work: Work) -> float | None:
        """Predicted time of a batch; None for one outside of what was measured."""
        measured = self._measured(work)
        return None if measured is None else measured * self.stretch

    def observe(self, work: Work, seconds: float) -> None:
        """Note how long a batch has taken."""
        measured = self._measured(work)
        if measured is not None:
            ratio = min(max(seconds / measured, self.stretch / MOST), self.stretch * MOST)
            self.stretch = FORGET * self.stretch + (1 - FORGET) * ratio

    def _measured(self, work: Work) -> float | None:
        rows = len(work.queries)
        return self.table.seconds(rows, sum(work.queries) / rows) if rows else None

"""Perturbed: a machine that is not as its profile says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.simulation.durations import Durations
from core.graph.work import Work
from core.messages.worker import Batch, PageCopy


@dataclass(frozen=True)
class Perturbed(Durations):
    """Batches take a multiple of what they take on another machine. ops: op -> multiple; others: of all other ops.
    ranks: rank -> multiple; a batch on several ranks waits for the slowest.
    """

    machine: Durations
    ops: Mapping[str, float] = field(default_factory=dict)
    others: float = 1.0
    ranks: Mapping[int, float] = field(default_factory=dict)

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        slowest = max(self.ranks.get(rank, 1.0) for rank in batch.ranks)
        return self.ops.get(batch.op, self.others) * slowest * self.machine.batch_seconds(batch, work)

    def copy_seconds(self, copy: PageCopy) -> float:
        return self.machine.copy_seconds(copy)

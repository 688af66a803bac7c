"""Recorder: simulated ranks that note the batches that they run."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.engine import Ranks
from core.messages.worker import Batch, ItemResult

BatchNote = tuple[float, str, int]
"""(seconds, op, requests) of a batch, when it ended."""


@dataclass
class Recorder(Ranks):
    """One for all ranks of an engine."""

    clock: Clock
    batches: list[BatchNote] = field(default_factory=list)

    def run(self, batch: Batch, rank: int) -> tuple[ItemResult, ...]:
        self.batches.append((self.clock.now, batch.op, len(batch.items)))
        return super().run(batch, rank)

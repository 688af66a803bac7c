"""LoneRun: requests that have a server alone, and what is learnt from them about it and about the machine."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from benchmarks.load.client import Outcome, Run
from benchmarks.serving.recorded import Arrival, Batch, successive
from benchmarks.simulation.outside import Crowding, Surroundings


class Probe(msgspec.Struct, frozen=True):
    """How fast the machine is at a time: what some requests take that come one after the other. Seconds."""

    op_seconds: dict[str, float]  # op -> of its batches, the mean
    step_seconds: float  # of steps, the median: what delays some of them for a moment does not count
    surroundings: Surroundings


@dataclass(frozen=True)
class LoneRun:
    """Requests that had a server to themselves: one after the other, or together in an open loop."""

    run: Run
    arrivals: list[Arrival]  # of these alone, and so are batches
    batches: list[Batch]
    outside_cpu: float  # see Surroundings

    @property
    def prepared(self) -> list[float]:
        """Seconds from when each was sent until the engine had it."""
        sent = sorted(self.run.started + outcome.sent for outcome in self.run.outcomes)
        return [arrival.now - when for arrival, when in zip(self.arrivals, sent, strict=True)]

    def step_period(self, least: int = 0) -> float:
        """Mean seconds from the begin of a request's step to that of its next one, of requests that share none. least:
        of the steps that begin while the engine has so many requests.
        """
        steps = [batch for batch in self.batches if batch.op == "denoise" and len(batch.requests) == 1]
        pairs = [pair for pair in successive(steps) if _is_same(*pair) and self._num_at(pair[0].started) >= least]
        return statistics.fmean(after.started - before.started for before, after in pairs)

    def prepare_seconds(self, least: int = 0) -> float:
        """Mean seconds from when a request is sent until the engine has it, of those that are sent while the engine has
        so many others.
        """
        pairs = zip(self.arrivals, self.prepared, strict=True)
        return statistics.fmean(seconds for arrival, seconds in pairs if self._num_at(arrival.now - seconds) >= least)

    def _num_at(self, when: float) -> int:
        """Requests that the engine had at a time, and whose last batch had not ended."""
        ends = self._ends
        return sum(each.now <= when < ends[each.request.request_id] for each in self.arrivals)

    @cached_property
    def _ends(self) -> dict[str, float]:
        """Request id -> when its last batch ended."""
        return {name: batch.ended for batch in self.batches for name in batch.requests}

    @property
    def surroundings(self) -> Surroundings:
        """Of requests that came one after the other."""
        deliver = [
            self.run.started + outcome.done - self._ends[arrival.request.request_id]
            for outcome, arrival in zip(self.run.outcomes, self.arrivals, strict=True)
        ]
        same = [pair for pair in successive(self.batches) if _is_same(*pair)]
        trips = [after.started - before.ended for before, after in same if not before.has_next(after)]
        pauses = [after.started - before.ended for before, after in same if before.has_next(after)]
        waits = [self._clock_starts(*pair) for pair in zip(self.run.outcomes, self.arrivals, strict=True)]
        arrive = [clock - self.run.started - of.sent for clock, of in zip(waits, self.run.outcomes, strict=True)]
        reserves = [
            clock + of.slo_ms / 1e3 - arrival.request.deadline
            for clock, of, arrival in zip(waits, self.run.outcomes, self.arrivals, strict=True)
            if of.slo_ms is not None and arrival.request.deadline is not None
        ]
        return Surroundings(
            prepare=statistics.median(self.prepared),
            deliver=statistics.median(deliver),
            arrive=statistics.median(arrive),
            hand_over=statistics.median(deliver) - statistics.median(reserves) if reserves else 0.0,
            trip=statistics.median(trips) if trips else 0.0,
            pause=statistics.fmean(pauses) if pauses else 0.0,
            outside_cpu=self.outside_cpu,
        )

    def _clock_starts(self, outcome: Outcome, arrival: Arrival) -> float:
        """When the server began to count the time that a request has, in seconds of CLOCK_MONOTONIC."""
        seconds: float = outcome.facts["ms"]["preprocess"] / 1e3
        return arrival.request.arrival - seconds

    @property
    def probe(self) -> Probe:
        """Of requests that came one after the other."""
        steps = [batch.seconds for batch in self.batches if batch.op == "denoise"]
        op_seconds = means_by_op(self.batches, lambda batch: batch.seconds)
        return Probe(op_seconds, statistics.median(steps), self.surroundings)


def crowding_of(alone: LoneRun, together: LoneRun, num_ranks: int) -> Crowding:
    """alone: requests that came one after the other. together: the same in an open loop, more than the ranks can do;
    each rank had one of them at a time. What counts is what happens while all ranks have one. Raises
    statistics.StatisticsError where nothing does.
    """
    steps = together.step_period(num_ranks) / alone.step_period()
    wait = together.prepare_seconds(num_ranks) - alone.prepare_seconds()
    return Crowding(max(1.0, steps), max(0.0, wait))


def _is_same(before: Batch, after: Batch) -> bool:
    return bool(before.requests) and before.requests == after.requests


def means_by_op(batches: Sequence[Batch], value: Callable[[Batch], float]) -> dict[str, float]:
    """Op -> mean of a value of its batches, those of the activation cache left out."""
    by_op = defaultdict[str, list[float]](list)
    for batch in batches:
        if batch.requests:
            by_op[batch.op].append(value(batch))
    return {op: statistics.fmean(values) for op, values in by_op.items()}

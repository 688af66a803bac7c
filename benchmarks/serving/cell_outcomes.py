"""Outcomes: what became of the requests of one cell, from what the client has seen and a policy has written down."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec

from benchmarks.load.client import Outcome, Run
from benchmarks.serving.recorded import Arrival, Batch
from benchmarks.simulation.server_engine import OpAtDegree, Surroundings

WINDOW = 5.0
"""Seconds over which a batch size is the mean."""


class Outcomes(msgspec.Struct, frozen=True):
    """One policy in one cell. Seconds."""

    sent: int
    in_time: int
    late: int
    refused: int  # before any work was done for them
    given_up: int
    failed: int
    seconds: float  # of the run
    busy: dict[str, float]  # op -> worker time
    engine_cpu: float  # CPU time of the engine's process
    policy_cpu: float  # and of the policy in it
    switching: float  # worker time between two ops, see `switching`
    mean_batch: dict[str, float]  # op -> requests in its batches
    batches: list[tuple[float, float]]  # (seconds, mean batch of the steps), by window
    late_sending: float  # P99 of how long after their due times requests were sent

    @property
    def worker_seconds(self) -> float:
        return sum(self.busy.values())


def surroundings_of(
    run: Run, arrivals: Sequence[Arrival], batches: Sequence[Batch], outside_cpu: float
) -> Surroundings:
    """Of requests that came one after the other."""
    ends = {name: batch.ended for batch in batches for name in batch.requests}
    prepare, deliver = list[float](), list[float]()
    for outcome, arrival in zip(run.outcomes, arrivals, strict=True):
        prepare.append(arrival.now - (run.started + outcome.sent))
        deliver.append(run.started + outcome.done - ends[arrival.request.request_id])
    trips = [gap for before, after in _successive(batches) if (gap := _wait(before, after)) and _is_same(before, after)]
    return Surroundings(
        prepare=statistics.median(prepare),
        deliver=statistics.median(deliver),
        trip=statistics.median(trips) if trips else 0.0,
        outside_cpu=outside_cpu,
    )


def _successive(batches: Sequence[Batch]) -> Iterator[tuple[Batch, Batch]]:
    """Each batch with the next one of its rank."""
    by_rank = defaultdict[int, list[Batch]](list)
    for batch in batches:
        by_rank[batch.rank].append(batch)
    for of_rank in by_rank.values():
        yield from pairwise(of_rank)


def _is_same(before: Batch, after: Batch) -> bool:
    return bool(before.requests) and before.requests == after.requests


def _wait(before: Batch, after: Batch) -> float | None:
    """Seconds between two batches, of which the second was sent after the end of the first; None if it was before."""
    return after.started - before.ended if after.sent is not None and after.sent > before.ended else None


def switching(batches: Sequence[Batch]) -> float:
    """Seconds between batches of different ops of a rank, where the second had been sent before the first one ended:
    the rank had work, and did none.
    """
    changes = ((before, after) for before, after in _successive(batches) if before.op != after.op)
    waits = (
        max(0.0, after.started - before.ended)
        for before, after in changes
        if after.sent is not None and after.sent <= before.ended
    )
    return sum(waits)


def outcomes_of(run: Run, before: Batch, batches: Sequence[Batch]) -> Outcomes:
    """before: the last batch of the warm-ups. batches: of the run."""
    ends = [_end(outcome) for outcome in run.outcomes]
    busy: defaultdict[str, float] = defaultdict(float)
    for batch in batches:
        busy[batch.op] += batch.seconds
    last = max(batches, key=lambda batch: batch.engine_cpu, default=before)
    lateness = sorted(outcome.sent - outcome.due for outcome in run.outcomes)
    return Outcomes(
        sent=len(ends),
        **{name: ends.count(name) for name in ("in_time", "late", "refused", "given_up", "failed")},
        seconds=run.seconds,
        busy=dict(busy),
        engine_cpu=last.engine_cpu - before.engine_cpu,
        policy_cpu=last.policy_cpu - before.policy_cpu,
        switching=switching(batches),
        mean_batch=means_by_op(batches, lambda batch: len(batch.requests)),
        batches=_windows([batch for batch in batches if batch.op == "denoise"], run.started),
        late_sending=lateness[int(0.99 * len(lateness))],
    )


def _end(outcome: Outcome) -> str:
    if not outcome.is_failed:
        return "in_time" if outcome.slo_ms is None or outcome.latency * 1e3 <= outcome.slo_ms else "late"
    status = outcome.refusal.status if outcome.refusal is not None else 0
    return {503: "refused", 504: "given_up"}.get(status, "failed")


def means_by_op(batches: Sequence[Batch], value: Callable[[Batch], float]) -> dict[str, float]:
    """Op -> mean of a value of its batches, those of the activation cache left out."""
    by_op = defaultdict[str, list[float]](list)
    for batch in batches:
        if batch.requests:
            by_op[batch.op].append(value(batch))
    return {op: statistics.fmean(values) for op, values in by_op.items()}


def seconds_by_op(batches: Sequence[Batch]) -> dict[OpAtDegree, float]:
    """Op and degree -> mean seconds of its batches, those of the activation cache left out."""
    degrees = {batch.degree for batch in batches}
    by_degree = {degree: [batch for batch in batches if batch.degree == degree] for degree in degrees}
    return {
        (op, degree): seconds
        for degree, of_degree in by_degree.items()
        for op, seconds in means_by_op(of_degree, lambda batch: batch.seconds).items()
    }


def _windows(steps: Sequence[Batch], start: float) -> list[tuple[float, float]]:
    by_window = defaultdict[int, list[int]](list)
    for batch in steps:
        by_window[int((batch.started - start) / WINDOW)].append(len(batch.requests))
    return [((window + 0.5) * WINDOW, statistics.fmean(sizes)) for window, sizes in sorted(by_window.items())]

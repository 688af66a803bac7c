"""Outcomes: what became of the requests of one cell, from what the client has seen and a policy has written down."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from benchmarks.load.client import Outcome, Run
from benchmarks.serving.lone_run import Probe, means_by_op
from benchmarks.serving.recorded import Batch, successive
from benchmarks.simulation.server_engine import OpAtDegree

WINDOW = 5.0
"""Seconds over which a batch size is the mean."""


class Outcomes(msgspec.Struct, frozen=True):
    """One policy in one cell. Seconds."""

    sent: int
    in_time: int
    late: int
    refused: int  # with 503
    given_up: int  # with 504
    failed: int
    seconds: float  # of the run
    busy: dict[str, float]  # op -> worker time
    engine_cpu: float  # CPU time of the engine's process
    policy_cpu: float  # and of the policy in it
    switching: float  # worker time between two ops, see `switching`
    mean_batch: dict[str, float]  # op -> requests in its batches
    batches: list[tuple[float, float]]  # (seconds, mean batch of the steps), by window
    late_sending: float  # P99 of how long after their due times requests were sent
    pace: float  # what steps took, as a multiple of what they took at first: objectives and arrivals follow it
    sending: list[float] = []  # these times, in the order of the requests
    probes: tuple[Probe, ...] = ()  # before the run, and after it

    @property
    def worker_seconds(self) -> float:
        return sum(self.busy.values())


def switching(batches: Sequence[Batch]) -> float:
    """Seconds between batches of different ops of a rank, where the second had been sent before the first one ended:
    the rank had work, and did none.
    """
    changes = ((before, after) for before, after in successive(batches) if before.op != after.op)
    waits = (
        max(0.0, after.started - before.ended)
        for before, after in changes
        if after.sent is not None and after.sent <= before.ended
    )
    return sum(waits)


def outcomes_of(run: Run, before: Batch, batches: Sequence[Batch], pace: float) -> Outcomes:
    """before: the last batch of the warm-ups. batches: of the run. pace: see Outcomes."""
    ends = [_end(outcome) for outcome in run.outcomes]
    busy: defaultdict[str, float] = defaultdict(float)
    for batch in batches:
        busy[batch.op] += batch.seconds
    last = max(batches, key=lambda batch: batch.engine_cpu, default=before)
    lateness = sorted(outcome.sent - outcome.due for outcome in run.outcomes)
    return Outcomes(
        sent=len(ends),
        in_time=ends.count("in_time"),
        late=ends.count("late"),
        refused=ends.count("refused"),
        given_up=ends.count("given_up"),
        failed=ends.count("failed"),
        seconds=run.seconds,
        busy=dict(busy),
        engine_cpu=last.engine_cpu - before.engine_cpu,
        policy_cpu=last.policy_cpu - before.policy_cpu,
        switching=switching(batches),
        mean_batch=means_by_op(batches, lambda batch: len(batch.requests)),
        batches=_windows([batch for batch in batches if batch.op == "denoise"], run.started),
        pace=pace,
        late_sending=lateness[int(0.99 * len(lateness))],
        sending=[outcome.sent - outcome.due for outcome in run.outcomes],
    )


def _end(outcome: Outcome) -> str:
    if not outcome.is_failed:
        return "in_time" if outcome.slo_ms is None or outcome.latency * 1e3 <= outcome.slo_ms else "late"
    status = outcome.refusal.status if outcome.refusal is not None else 0
    return {503: "refused", 504: "given_up"}.get(status, "failed")


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

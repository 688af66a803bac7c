"""Figures of a run of edits: rates, latencies, SLOs. A figure that the server does not report is None."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.load.client import Outcome, Run
from benchmarks.report import percentile


class Spread(msgspec.Struct, frozen=True):
    """Milliseconds. percentiles: (percent, value); None is infinite: the edit that failed there has no end."""

    mean: float | None
    median: float | None
    percentiles: tuple[tuple[float, float | None], ...]

    @classmethod
    def of(cls, seconds: Sequence[float], percents: Sequence[float]) -> Spread | None:
        if not seconds:
            return None
        ranked = tuple((percent, _ms(percentile(seconds, percent / 100))) for percent in percents)
        return cls(_ms(statistics.fmean(seconds)), _ms(statistics.median(seconds)), ranked)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Rates in edits per second, throughput and goodput from the start of arrivals to the last answer.
    achieved: the same less the shortest latency, since no server answers the last arrival at once. goodput: edits
    within their SLO; None if one has none. slo_ms: the median of these. latency: from due to picture, infinite for
    a failed edit. latency_completed_ms: mean of successful ones. queue: reported by the server. keeps_up: achieved
    at least 0.98 of the offered rate without a failure; None without a rate. client_late_ms: P99 of how long after
    their due times edits were sent.
    """

    num_edits: int
    num_failed: int
    seconds: float
    request_rate: float | None
    throughput: float
    achieved: float
    goodput: float | None
    slo_attainment: float | None
    slo_ms: float | None
    keeps_up: bool | None
    latency: Spread | None
    latency_completed_ms: float | None
    queue: Spread | None
    first_image: Spread | None
    mask_area: float | None
    mask_ratio: float | None
    hit_ratio: float | None
    worker_seconds: dict[str, float] | None
    client_late_ms: float
    client_cpu_ms: float
    errors: tuple[str, ...]


KEEPS_UP = 0.98


@dataclass(frozen=True)
class Context:
    """What a summary needs beside the run. request_rate: offered, None in a closed loop. areas: of the masks sent.
    worker_seconds: computing time of the workers during the run, by stage."""

    percents: Sequence[float] = (95.0, 99.0)
    request_rate: float | None = None
    areas: Sequence[float] = ()
    worker_seconds: Mapping[str, float] | None = None
    wants_first_image: bool = False


def summarise(run: Run, context: Context) -> Summary:
    outcomes = run.outcomes
    seconds = max(run.seconds, 1e-9)
    completed = [outcome for outcome in outcomes if not outcome.is_failed]
    known = [outcome.slo_ms for outcome in outcomes if outcome.slo_ms is not None]
    within = sum(map(_is_within, outcomes, known)) if known and len(known) == len(outcomes) else None
    achieved = _achieved(completed, seconds)
    return Summary(
        num_edits=len(outcomes),
        num_failed=len(outcomes) - len(completed),
        seconds=seconds,
        request_rate=context.request_rate,
        throughput=len(completed) / seconds,
        achieved=achieved,
        goodput=None if within is None else within / seconds,
        slo_attainment=None if within is None else within / len(outcomes),
        slo_ms=statistics.median(known) if known else None,
        keeps_up=_keeps_up(achieved, context.request_rate, len(outcomes) - len(completed)),
        latency=Spread.of([outcome.latency for outcome in outcomes], context.percents),
        latency_completed_ms=_mean([1e3 * outcome.latency for outcome in completed]),
        queue=Spread.of(_queue_seconds(completed), context.percents),
        first_image=_first_image(completed, context),
        mask_area=_mean(context.areas),
        mask_ratio=_mean(_facts(completed, "mask_ratio")),
        hit_ratio=_mean([fact == "hit" for fact in _facts(completed, "cache") if fact in ("hit", "miss")]),
        worker_seconds=None if context.worker_seconds is None else dict(context.worker_seconds),
        client_late_ms=1e3 * percentile([outcome.sent - outcome.due for outcome in outcomes] or [0.0], 0.99),
        client_cpu_ms=1e3 * run.cpu_seconds / max(1, len(outcomes)),
        errors=tuple(sorted({outcome.error for outcome in outcomes if outcome.error})[:5]),
    )


def _is_within(outcome: Outcome, slo_ms: float) -> bool:
    return not outcome.is_failed and outcome.latency * 1e3 <= slo_ms


def _achieved(completed: Sequence[Outcome], seconds: float) -> float:
    floor = min((outcome.latency for outcome in completed), default=0.0)
    return len(completed) / max(seconds - floor, 1e-9)


def _keeps_up(achieved: float, rate: float | None, num_failed: int) -> bool | None:
    if rate is None or math.isinf(rate):
        return None
    return achieved >= KEEPS_UP * rate and not num_failed


def _queue_seconds(completed: Iterable[Outcome]) -> list[float]:
    return [ms["queue"] / 1e3 for ms in _facts(completed, "ms") if "queue" in ms]


def _first_image(completed: Sequence[Outcome], context: Context) -> Spread | None:
    if not context.wants_first_image:
        return None
    seconds = [outcome.first_image - outcome.due for outcome in completed if outcome.first_image is not None]
    return Spread.of(seconds, context.percents)


def _facts(completed: Iterable[Outcome], name: str) -> list:  # type: ignore[type-arg]  # whatever a server says
    return [outcome.facts[name] for outcome in completed if outcome.facts.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _ms(seconds: float) -> float | None:
    return None if math.isinf(seconds) else 1e3 * seconds

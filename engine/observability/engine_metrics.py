"""EngineMetrics: Prometheus metrics from the engines' reports: steps, tokens, the cost model, the activation cache.

Series are sums over the engines, except those that show how evenly work is spread: these have one value per engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, get_args

from prometheus_client import Gauge

from core.costs.load_report import CacheStats, EngineStats, LoadReport, QuarantineCause, RankModelState, StepSample
from core.scheduling.ops import BUILT_IN
from engine.observability.metric_registry import MetricRegistry

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_DEGREES = (1, 2, 4, 8, 16, 32, 64)
_STEP_TOKENS = tuple(2.0**power for power in range(4, 18))

_NO_STATS = EngineStats(
    op_seconds={},
    ranks=(),
    r_squared={},
    steps=0,
    batch_tokens=0,
    batch_requests=0,
    tokens_skipped=0,
    prime_chunks=0,
    busy_seconds={},
)
_NO_CACHE = CacheStats(
    hits={},
    misses=0,
    primed=0,
    evictions={},
    loads={},
    failed_loads=0,
    failed_stores=0,
    entries={},
    used_bytes={},
    budget_bytes={},
    load_seconds=0.0,
)
_OP_NAMES = tuple(dict.fromkeys(op.cost_name for op in BUILT_IN))  # a name may cover several ops
_TOTALS = {  # field of EngineStats -> name, text
    "steps": ("steps", "Denoising steps run."),
    "mixed_steps": ("mixed_steps", "Denoising steps that requests of several served models shared."),
    "batch_tokens": ("tokens_computed", "Tokens computed in denoising steps."),
    "tokens_skipped": ("tokens_skipped", "Image tokens left out of denoising steps by mask-aware execution."),
    "steps_repeated": ("steps_repeated", "Steps of images that were lost with a worker and done again."),
    "prime_chunks": ("prime_chunks", "Chunks of priming run."),
}
_CACHE_TOTALS = {
    "misses": "Entries requested that were on no tier.",
    "primed": "Entries computed.",
    "failed_loads": "Loads that found a file missing, torn or foreign.",
    "failed_stores": "Copies to a slower tier that failed, such as to a full disk.",
    "load_seconds": "Time spent copying entries into a faster tier.",
}
_CACHE_TIER_TOTALS = {
    "hits": "Entries requested that were on the tier.",
    "evictions": "Entries evicted to make room for others.",
    "loads": "Entries copied into a faster tier.",
}
_CACHE_TIER_LEVELS = {
    "entries": "Entries held.",
    "used_bytes": "Bytes of the entries held.",
    "budget_bytes": "Most bytes that entries may take.",
}


class EngineMetrics:
    """Collectors that are set from load reports. Call `expect_engine` first."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._stats: dict[int, EngineStats] = {}  # engine -> the last one it sent
        self._watched_stages: set[str] = set()
        self._make_engine_collectors(registry)
        self._make_step_collectors(registry)
        self._make_cache_collectors(registry)

    def _make_engine_collectors(self, registry: MetricRegistry) -> None:
        self._alive = registry.gauge("engine_alive", "1 while an engine serves, 0 while it does not.", "engine")
        self._rank_restarts = registry.counter(
            "rank_restarts", "Workers that died and were restarted while their engine lived on.", "engine"
        )
        self._quarantined = registry.gauge(
            "model_quarantined",
            "Refusals of a model, or of ControlNets of one, that has not run since: of engines, or owners.",
            "model_name",
            "controlnets",
            "cause",
        )
        self._model_ranks = registry.gauge(
            "model_ranks", "Workers that have a model, load it, or refuse it.", "model_name", "state"
        )
        self._model_hits = registry.counter(
            "model_hits", "Loops of steps that images have begun with a model that a worker had.", "model_name"
        )
        self._model_loads = registry.counter("model_loads", "How often workers have loaded a model.", "model_name")
        self._restarts = registry.counter("engine_restarts", "Starts of an engine after its death.", "engine")
        self._running = registry.gauge("engine_requests_running", "Images that an engine has begun.", "engine")
        self._waiting = registry.gauge("engine_requests_waiting", "Images queued in an engine.", "engine")
        self._drain_seconds = registry.gauge(
            "predicted_drain_seconds", "Predicted time until all that an engine holds is done.", "engine"
        )
        self._busy_seconds = registry.counter(
            "worker_busy_seconds", "Time an engine's workers spent computing, by stage.", "engine", "stage"
        )
        self._totals = {field: registry.counter(name, text) for field, (name, text) in _TOTALS.items()}

    def _make_step_collectors(self, registry: MetricRegistry) -> None:
        self._batch_size = registry.histogram("step_batch_size", "Images in one denoising step.", _BATCH_SIZES)
        self._step_tokens = registry.histogram("step_tokens", "Tokens computed in one denoising step.", _STEP_TOKENS)
        self._degree = registry.histogram("step_degree", "Workers that computed one denoising step together.", _DEGREES)
        self._step_seconds = registry.histogram("step_time_seconds", "Time of one denoising step.", STEP_SECONDS)
        self._predicted_seconds = registry.counter(
            "step_predicted_seconds", "What the cost model predicted for the steps of step_time_seconds."
        )
        self._bound_seconds = registry.counter(
            "step_bound_seconds", "The part of these predictions that grows with the tokens, which no batching saves."
        )
        self._r_squared = registry.gauge(
            "cost_model_r_squared", "How well a stage's cost is predicted; 1 = exactly. The worst engine's.", "stage"
        )

    def _make_cache_collectors(self, registry: MetricRegistry) -> None:
        """One collector per field of CacheStats."""
        self._cache_totals = {field: registry.counter(f"cache_{field}", text) for field, text in _CACHE_TOTALS.items()}
        self._cache_tier_totals = {
            field: registry.counter(f"cache_{field}", text, "tier") for field, text in _CACHE_TIER_TOTALS.items()
        }
        self._cache_tier_levels = {
            field: registry.gauge(f"cache_{field}", text, "tier") for field, text in _CACHE_TIER_LEVELS.items()
        }

    def expect_engine(self, engine: int) -> None:
        """Create the series of an engine, before any report."""
        for collector in (self._alive, self._restarts, self._rank_restarts, *self._load_gauges()):
            collector.labels(str(engine))
        for stage in _OP_NAMES:
            self._busy_seconds.labels(str(engine), stage)

    def forget_engine(self, engine: int) -> None:
        """Remove the gauges of an engine that has left; its counters are kept."""
        self.observe_lost(engine)
        for gauge in (self._alive, *self._load_gauges()):
            gauge.remove(str(engine))

    def expect_model(self, name: str) -> None:
        """Create the series of a model, before any report."""
        for cause in get_args(QuarantineCause):
            self._quarantined.labels(name, "", cause)
        for state in get_args(RankModelState):
            self._model_ranks.labels(name, state)
        for counter in (self._model_hits, self._model_loads):
            counter.labels(name)

    def observe(self, engine: int, load: LoadReport, stats: EngineStats | None) -> None:
        """Take over an engine's report. An engine with totals lower than before has been restarted."""
        self._alive.labels(str(engine)).set(load.num_ranks > 0)
        self._running.labels(str(engine)).set(load.num_running)
        self._waiting.labels(str(engine)).set(load.num_waiting)
        self._drain_seconds.labels(str(engine)).set(load.drain_seconds)
        if stats is not None:
            last = self._stats.get(engine, _NO_STATS)
            is_restarted = stats.steps < last.steps or _is_less_busy(stats, last)
            self._stats[engine] = stats
            self._observe_stats(engine, stats, _NO_STATS if is_restarted else last)
            self._move_levels(last.cache or _NO_CACHE, stats.cache or _NO_CACHE)
            self._move_quarantine(last, stats)
            self._move_ranks(last, stats)

    def observe_restart(self, engine: int) -> None:
        """Count a restart of an engine."""
        self._restarts.labels(str(engine)).inc()

    def observe_lost(self, engine: int) -> None:
        """Set an engine that has died to 0: it has no requests and no cache entries any more."""
        for gauge in (self._alive, *self._load_gauges()):
            gauge.labels(str(engine)).set(0)
        gone = self._stats.pop(engine, _NO_STATS)
        self._move_levels(gone.cache or _NO_CACHE, _NO_CACHE)
        self._move_quarantine(gone, _NO_STATS)
        self._move_ranks(gone, _NO_STATS)

    def _load_gauges(self) -> tuple[Gauge, ...]:
        return self._running, self._waiting, self._drain_seconds

    def _observe_stats(self, engine: int, stats: EngineStats, last: EngineStats) -> None:
        for stage, seconds in stats.busy_seconds.items():
            self._busy_seconds.labels(str(engine), stage).inc(seconds - last.busy_seconds.get(stage, 0.0))
        for field, total in self._totals.items():
            total.inc(getattr(stats, field) - getattr(last, field))
        for counter, now, then in (
            (self._model_hits, stats.model_hits, last.model_hits),
            (self._model_loads, stats.model_loads, last.model_loads),
        ):
            for name, number in now.items():
                counter.labels(name).inc(number - then.get(name, 0))
        deaths, before = (sum(rank.deaths for rank in each.ranks) for each in (stats, last))
        self._rank_restarts.labels(str(engine)).inc(deaths - before)
        self._observe_steps(stats.recent_steps)
        self._watch_r_squared(stats.r_squared)
        self._observe_cache(stats.cache or _NO_CACHE, last.cache or _NO_CACHE)

    def _observe_steps(self, steps: Sequence[StepSample]) -> None:
        for step in steps:
            self._batch_size.observe(step.num_requests)
            self._step_tokens.observe(step.num_tokens)
            self._degree.observe(step.degree)
            self._step_seconds.observe(step.seconds)
        self._predicted_seconds.inc(sum(step.predicted_seconds for step in steps))
        self._bound_seconds.inc(sum(step.bound_seconds for step in steps))

    def _watch_r_squared(self, r_squared: Mapping[str, float]) -> None:
        """Create a series for each stage with a known value (not NaN). The minimum over the engines is computed at each
        scrape: at each report it would cost the square of the number of engines.
        """
        for stage, value in r_squared.items():
            if stage not in self._watched_stages and not math.isnan(value):
                self._watched_stages.add(stage)
                self._r_squared.labels(stage).set_function(partial(self._worst_r_squared, stage))

    def _worst_r_squared(self, stage: str) -> float:
        values = [stats.r_squared.get(stage, math.nan) for stats in self._stats.values()]
        return min((value for value in values if not math.isnan(value)), default=math.nan)

    def _observe_cache(self, stats: CacheStats, last: CacheStats) -> None:
        for field, total in self._cache_totals.items():
            total.inc(getattr(stats, field) - getattr(last, field))
        for field, by_tier in self._cache_tier_totals.items():
            before = getattr(last, field)
            for tier, value in getattr(stats, field).items():
                by_tier.labels(tier).inc(value - before.get(tier, 0))

    def _move_levels(self, before: CacheStats, now: CacheStats) -> None:
        """Replace an engine's part of the gauges, `before`, by `now`."""
        for field, level in self._cache_tier_levels.items():
            held, holds = getattr(before, field), getattr(now, field)
            for tier in held | holds:
                level.labels(tier).inc(holds.get(tier, 0) - held.get(tier, 0))

    def _move_quarantine(self, before: EngineStats, now: EngineStats) -> None:
        """Replace an engine's part of the gauge."""
        for stats, sign in ((before, -1), (now, 1)):
            for each in stats.quarantine:
                self._quarantined.labels(each.model, ",".join(each.controlnets), each.cause).inc(sign)

    def _move_ranks(self, before: EngineStats, now: EngineStats) -> None:
        """Replace an engine's part of the gauge."""
        for stats, sign in ((before, -1), (now, 1)):
            for each in chain.from_iterable(rank.models for rank in stats.ranks):
                self._model_ranks.labels(each.model, each.state).inc(sign)


def _is_less_busy(stats: EngineStats, last: EngineStats) -> bool:
    """Whether any stage has less worker time than in the last report."""
    return any(stats.busy_seconds.get(stage, 0.0) < seconds for stage, seconds in last.busy_seconds.items())


def sum_cache_stats(every: Iterable[CacheStats | None]) -> CacheStats:
    """The sum of all fields over `every`; None counts as zero."""
    known = [stats or _NO_CACHE for stats in every]
    return CacheStats(
        **{field: _sum([getattr(stats, field) for stats in known]) for field in CacheStats.__struct_fields__}
    )


def sum_by_key(every: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """For each key, the sum over the mappings that have it."""
    known = list(every)
    return {key: sum(values.get(key, 0) for values in known) for key in dict.fromkeys(chain.from_iterable(known))}


def _sum(values: Sequence[Any]) -> Any:
    """Sum of numbers, or of dictionaries of numbers by key."""
    return sum_by_key(values) if any(isinstance(value, dict) for value in values) else sum(values)

"""The Prometheus metrics of one AsyncEngine: what is counted, under which names.

Names follow vLLM's under the prefix ``stencil:``. Gateways that look for ``vllm:num_requests_running`` and
``vllm:num_requests_waiting`` find these two as well. Each Metrics object has its own registry, so that two engines in
one process (tests, offline use) never share a counter. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from core.messages import CacheStats, LoadReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

RejectReason = Literal["queue_full", "not_ready", "shutting_down"]

_LATENCY_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
_STAGE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0)
_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_STEP_COUNTS = (1, 2, 4, 8, 16, 28, 50, 100, 200)
_NO_LOAD = LoadReport(
    num_running=0,
    num_waiting=0,
    drain_seconds=0.0,
    stage_seconds={},
    resident_models=(),
    page_digest="",
    r_squared={},
    steps=0,
    batch_tokens=0,
    batch_requests=0,
    tokens_skipped=0,
    prime_chunks=0,
    busy_seconds=0.0,
)
_NO_CACHE = CacheStats(
    hits={},
    misses=0,
    primed=0,
    evictions={},
    loads={},
    failed_loads=0,
    entries={},
    used_bytes={},
    budget_bytes={},
    load_seconds=0.0,
)
_CACHE_TOTALS = {
    "misses": "Entries asked for that were on no tier.",
    "primed": "Entries computed.",
    "failed_loads": "Loads that found a file missing, torn or foreign.",
    "load_seconds": "Time spent copying entries into a faster tier.",
}
_CACHE_TIER_TOTALS = {
    "hits": "Entries asked for that were there.",
    "evictions": "Entries given up for others.",
    "loads": "Entries copied into a faster tier.",
}
_CACHE_TIER_LEVELS = {
    "entries": "Entries held.",
    "used_bytes": "Bytes that they take.",
    "budget_bytes": "Bytes that they may take at most.",
}


class Metrics:
    """Collectors of one engine. Every method is cheap and may be called from the event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._last_load: dict[int, LoadReport] = {}  # engine index -> its previous report
        self._make_request_collectors()
        self._make_step_collectors()
        self._make_cache_collectors()

    def _make_request_collectors(self) -> None:
        self._e2e_seconds = self._histogram(
            "e2e_request_latency_seconds", "From submission to the encoded image.", _LATENCY_SECONDS, "model_name"
        )
        self._queue_seconds = self._histogram(
            "request_queue_time_seconds", "Waiting for the first stage.", _LATENCY_SECONDS, "model_name"
        )
        self._stage_seconds = self._histogram(
            "request_stage_time_seconds", "Time of one request in one stage.", _STAGE_SECONDS, "model_name", "stage"
        )
        self._mask_ratio = self._histogram(
            "request_mask_ratio", "Active tokens over image tokens.", _RATIOS, "model_name"
        )
        self._inference_steps = self._histogram(
            "request_inference_steps", "Denoising steps asked for.", _STEP_COUNTS, "model_name"
        )
        self._success = self._counter(
            "request_success", "Images that reached a terminal state.", "model_name", "finished_reason"
        )
        self._cache_results = self._counter(
            "request_cache_result", "Images by whether all the pages they needed were there.", "model_name", "result"
        )
        self._aborts = self._counter("request_aborts", "Images given up by their client.", "model_name")
        self._rejects = self._counter("request_rejects", "Requests refused at the door.", "reason")

    def _make_step_collectors(self) -> None:
        self._batch_size = self._histogram("step_batch_size", "Requests in one denoising step.", _BATCH_SIZES)
        self._steps = self._counter("steps", "Denoising steps run.")
        self._tokens = self._counter("tokens_computed", "Tokens computed in denoising steps.")
        self._tokens_skipped = self._counter(
            "tokens_skipped", "Image tokens left out of denoising steps by mask-aware execution."
        )
        self._prime_chunks = self._counter("prime_chunks", "Chunks of priming run.")
        self._busy_seconds = self._counter("worker_busy_seconds", "Time workers spent computing.")
        self._drain_seconds = self._gauge("predicted_drain_seconds", "Predicted time until all held work is done.")
        self._r_squared = self._gauge(
            "cost_model_r_squared", "How well a stage's cost is predicted; 1 = exactly.", "stage"
        )

    def _make_cache_collectors(self) -> None:
        """Each by the field of CacheStats that it shows."""
        self._cache_totals = {field: self._counter(f"cache_{field}", text) for field, text in _CACHE_TOTALS.items()}
        self._cache_tier_totals = {
            field: self._counter(f"cache_{field}", text, "tier") for field, text in _CACHE_TIER_TOTALS.items()
        }
        self._cache_tier_levels = {
            field: self._gauge(f"cache_{field}", text, "tier") for field, text in _CACHE_TIER_LEVELS.items()
        }

    def watch_queue(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Read the queue gauges from these at each scrape. Waiting includes images queued inside the scheduler."""
        for prefix in ("stencil", "vllm"):
            for name, value in (("running", running), ("waiting", waiting)):
                text = f"Images {name}."
                gauge = Gauge(f"{prefix}:num_requests_{name}", text, registry=self._registry)
                gauge.set_function(value)

    def observe_finished(
        self,
        model: str,
        *,
        seconds: float,
        ms: Mapping[str, float],
        mask_ratio: float,
        cache: Literal["hit", "miss", "off"],
        num_inference_steps: int,
    ) -> None:
        """One image left whole. `seconds`: submission to encoded file; `ms`, `cache`: the response's `stencil.ms` and
        `stencil.cache`.
        """
        self._success.labels(model, "stop").inc()
        self._e2e_seconds.labels(model).observe(seconds)
        self._mask_ratio.labels(model).observe(mask_ratio)
        self._cache_results.labels(model, cache).inc()
        self._inference_steps.labels(model).observe(num_inference_steps)
        for stage, value in ms.items():
            if stage == "queue":
                self._queue_seconds.labels(model).observe(value / 1e3)
            elif stage != "prime" or value > 0:  # most edits are primed by nobody, which says nothing of priming
                self._stage_seconds.labels(model, stage).observe(value / 1e3)

    def observe_aborted(self, model: str) -> None:
        """One accepted image was given up by its client."""
        self._success.labels(model, "abort").inc()
        self._aborts.labels(model).inc()

    def observe_failed(self, model: str) -> None:
        """One accepted image failed."""
        self._success.labels(model, "error").inc()

    def observe_rejected(self, reason: RejectReason) -> None:
        """One request was refused before it was accepted."""
        self._rejects.labels(reason).inc()

    def observe_load(self, load: LoadReport, engine: int = 0) -> None:
        """Take over the totals of engine number `engine`; totals that went down belong to a restarted one."""
        last = self._last_load.get(engine)
        self._last_load[engine] = load
        if last is None or load.steps < last.steps or load.busy_seconds < last.busy_seconds:
            last = _NO_LOAD
        steps = load.steps - last.steps
        self._steps.inc(steps)
        self._tokens.inc(load.batch_tokens - last.batch_tokens)
        self._tokens_skipped.inc(load.tokens_skipped - last.tokens_skipped)
        self._prime_chunks.inc(load.prime_chunks - last.prime_chunks)
        self._busy_seconds.inc(load.busy_seconds - last.busy_seconds)
        for stage, value in load.r_squared.items():
            self._r_squared.labels(stage).set(value)
        self._drain_seconds.set(sum(report.drain_seconds for report in self._last_load.values()))
        for _ in range(steps):
            self._batch_size.observe((load.batch_requests - last.batch_requests) / steps)
        self._observe_cache(load.cache or _NO_CACHE, last.cache or _NO_CACHE)

    def _observe_cache(self, stats: CacheStats, last: CacheStats) -> None:
        for field, total in self._cache_totals.items():
            total.inc(getattr(stats, field) - getattr(last, field))
        for field, by_tier in self._cache_tier_totals.items():
            before = getattr(last, field)
            for tier, value in getattr(stats, field).items():
                by_tier.labels(tier).inc(value - before.get(tier, 0))
        for field, level in self._cache_tier_levels.items():
            for tier, value in self._sum_by_tier(field).items():
                level.labels(tier).set(value)

    def _sum_by_tier(self, field: str) -> dict[str, int]:
        """A dictionary of CacheStats, summed over all engines."""
        total: dict[str, int] = {}
        for report in self._last_load.values():
            for tier, value in getattr(report.cache or _NO_CACHE, field).items():
                total[tier] = total.get(tier, 0) + value
        return total

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format (CONTENT_TYPE)."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"stencil:{name}", text, labels, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"stencil:{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"stencil:{name}", text, labels, registry=self._registry)

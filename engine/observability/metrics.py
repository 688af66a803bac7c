"""Metrics: the Prometheus metrics of one AsyncEngine; called by the engine's client, the router and the API server.

Names follow vLLM's under the prefix ``stencil:``; those that gateways read (llm-d, production-stack) are exported under
vLLM's own prefix as well. docs/observability.md lists all names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol, get_args

from core.costs.load_report import EngineStats, LoadReport
from core.handles import CacheResult
from engine.observability.engine_metrics import EngineMetrics
from engine.observability.metric_registry import CONTENT_TYPE, PREFIX, MetricRegistry

__all__ = ["CONTENT_TYPE", "Metrics", "RejectReason"]

RejectReason = Literal[
    "queue_full", "not_ready", "shutting_down", "invalid", "unauthorized", "rate_limit", "no_disk", "timeout"
]
DropReason = Literal["timeout", "slo", "displaced"]
FinishedReason = Literal["stop", "abort", "error"]

GATEWAYS = "vllm:"
"""The prefix of the metrics that gateways read."""

STAGES = ("preprocess", "segment", "encode", "prime", "denoise", "decode", "postprocess")
"""Parts of the response's `stencil.ms`, except queue."""

_LATENCY_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
_STAGE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0)
_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
_STEP_COUNTS = (1, 2, 4, 8, 16, 28, 50, 100, 200)
_ERRORS = (-0.75, -0.5, -0.3, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class States(Protocol):
    """The values exported for approximate caching; implemented by `engine.client.recall.kept_states.KeptStates`."""

    used_bytes: int
    num_recalled: int


class ImageProcessors(Protocol):
    """The values exported for the image processors; implemented by `engine.images.image_pool.ImagePool`."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_deaths(self) -> int: ...
    @property
    def num_retries(self) -> int: ...
    @property
    def result_bytes(self) -> int: ...


class Metrics:
    """Collectors of one AsyncEngine. All methods are cheap enough for the event loop."""

    def __init__(self) -> None:
        self._registry = MetricRegistry()
        self._engines = EngineMetrics(self._registry)
        self._make_request_collectors(self._registry)
        self._make_router_collectors(self._registry)
        self._make_gateway_collectors(self._registry)

    def _make_request_collectors(self, registry: MetricRegistry) -> None:
        self._e2e_seconds = registry.histogram(
            "e2e_request_latency_seconds", "From submission to the encoded image.", _LATENCY_SECONDS, "model_name"
        )
        self._queue_seconds = registry.histogram(
            "request_queue_time_seconds", "Waiting for the first stage.", _LATENCY_SECONDS, "model_name"
        )
        self._stage_seconds = registry.histogram(
            "request_stage_time_seconds", "Time of one request in one stage.", _STAGE_SECONDS, "model_name", "stage"
        )
        self._mask_ratio = registry.histogram(
            "request_mask_ratio", "Active tokens over image tokens.", _RATIOS, "model_name"
        )
        self._inference_steps = registry.histogram(
            "request_inference_steps", "Denoising steps asked for.", _STEP_COUNTS, "model_name"
        )
        self._success = registry.counter(
            "request_success", "Images that reached a terminal state.", "model_name", "finished_reason"
        )
        self._cache_results = registry.counter(
            "request_cache_result", "Images by whether all the pages they needed were there.", "model_name", "result"
        )
        self._rejects = registry.counter("request_rejects", "Requests refused before they were accepted.", "reason")
        for reason in get_args(RejectReason):
            self._rejects.labels(reason)
        self._drops = registry.counter("request_drops", "Requests given up after they were accepted.", "reason")
        for drop in get_args(DropReason):
            self._drops.labels(drop)
        self._objective = registry.counter("request_slo", "Finished images by the latency objective.", "result")
        for result in ("met", "missed"):
            self._objective.labels(result)

    def _make_router_collectors(self, registry: MetricRegistry) -> None:
        self._routed = registry.counter("router_requests", "Images by the engine they were sent to.", "engine")
        self._retries = registry.counter(
            "request_retries", "Images and templates sent again after the death of the engine that had them."
        )
        self._prediction_error = registry.histogram(
            "router_prediction_error_ratio",
            "How far the time predicted for a finished image was off: predicted / actual - 1.",
            _ERRORS,
        )

    def _make_gateway_collectors(self, registry: MetricRegistry) -> None:
        """The adapters as gateways read them: without this metric they take a server for broken."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        self._adapters = registry.gauge(
            "lora_requests_info", "Adapters; the time of the scrape.", *labels, prefix=GATEWAYS
        )
        self._adapter_names: Sequence[str] = ()

    # ---------------------------------------------------------------------------------- set-up

    def name_adapters(self, names: Sequence[str]) -> None:
        """Export these adapters as loaded, and their number as the maximum."""
        self._adapter_names = tuple(names)

    def expect(self, models: Iterable[str], num_engines: int) -> None:
        """Create the series of these models and of engines 0..num_engines - 1, so that they exist before any event."""
        for model in models:
            for histogram in (self._e2e_seconds, self._queue_seconds, self._mask_ratio, self._inference_steps):
                histogram.labels(model)
            for stage in STAGES:
                self._stage_seconds.labels(model, stage)
            for reason in get_args(FinishedReason):
                self._success.labels(model, reason)
            for result in get_args(CacheResult):
                self._cache_results.labels(model, result)
            self._engines.expect_model(model)
        for engine in range(num_engines):
            self.expect_engine(engine)

    def expect_engine(self, engine: int) -> None:
        """Create the series of one engine."""
        self._routed.labels(str(engine))
        self._engines.expect_engine(engine)

    def forget_engine(self, engine: int) -> None:
        """Remove what tells of the present of an engine that has left; what it has done is kept."""
        self._engines.forget_engine(engine)

    def watch_queue(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Export these as queue gauges, read at each scrape. waiting: includes images queued inside the scheduler."""
        for prefix in (PREFIX, GATEWAYS):
            for name, value in (("running", running), ("waiting", waiting)):
                gauge = self._registry.gauge(f"num_requests_{name}", f"Images {name}.", prefix=prefix)
                gauge.set_function(value)

    def watch_image_processors(self, images: ImageProcessors, drain_seconds: Callable[[], float]) -> None:
        """Export these, read at each scrape. drain_seconds: predicted time until all admitted image work is done."""
        registry = self._registry
        waiting = registry.gauge("image_jobs_waiting", "Images that wait to be decoded or encoded.")
        waiting.set_function(lambda: images.num_waiting)
        running = registry.gauge("image_jobs_running", "Images that are decoded or encoded now.")
        running.set_function(lambda: images.num_running)
        drain = registry.gauge("image_drain_seconds", "Predicted time until all admitted image work is done.")
        drain.set_function(drain_seconds)
        results = registry.gauge("image_result_bytes", "Encoded results in memory until their clients have them.")
        results.set_function(lambda: images.result_bytes)
        registry.watched_counter(
            "image_processor_deaths",
            "Image processors that died; each is replaced.",
            lambda: images.num_deaths,
        )
        registry.watched_counter(
            "image_job_retries", "Jobs tried again after their processor's death.", lambda: images.num_retries
        )

    def watch_states(self, states: States) -> None:
        """Export these, read at each scrape."""
        used = self._registry.gauge("approximate_cache_used_bytes", "States that pictures have kept.")
        used.set_function(lambda: states.used_bytes)
        self._registry.watched_counter(
            "approximate_cache_hits", "Pictures that began in an earlier one's state.", lambda: states.num_recalled
        )

    # ---------------------------------------------------------------------------------- events

    def observe_finished(
        self,
        model: str,
        *,
        seconds: float,
        ms: Mapping[str, float],
        mask_ratio: float,
        cache: CacheResult,
        num_inference_steps: int,
    ) -> None:
        """One image was finished. seconds: from submission to the encoded file. ms, cache: the response's `stencil.ms`
        and `stencil.cache`.
        """
        self._success.labels(model, "stop").inc()
        self._e2e_seconds.labels(model).observe(seconds)
        self._queue_seconds.labels(model).observe(ms["queue"] / 1e3)
        self._mask_ratio.labels(model).observe(mask_ratio)
        self._cache_results.labels(model, cache).inc()
        self._inference_steps.labels(model).observe(num_inference_steps)
        for stage in STAGES:
            # Not the time of a stage that the edit did not have: one that primed nothing, or whose mask was given.
            if ms.get(stage, 0.0) > 0 or stage not in ("prime", "segment"):
                self._stage_seconds.labels(model, stage).observe(ms[stage] / 1e3)

    def observe_mask(self, model: str, ms: Mapping[str, float]) -> None:
        """One mask alone was found. ms: its answer's `stencil.ms`."""
        self._success.labels(model, "stop").inc()
        self._stage_seconds.labels(model, "segment").observe(ms["segment"] / 1e3)

    def observe_aborted(self, model: str) -> None:
        """One accepted image was aborted by its client."""
        self._success.labels(model, "abort").inc()

    def observe_failed(self, model: str) -> None:
        """One accepted image failed."""
        self._success.labels(model, "error").inc()

    def observe_rejected(self, reason: RejectReason) -> None:
        """One request was refused before it was accepted."""
        self._rejects.labels(reason).inc()

    def observe_dropped(self, reason: DropReason) -> None:
        """One accepted request was dropped: it was late, would have been late, or was displaced by a higher class."""
        self._drops.labels(reason).inc()

    def observe_objective(self, *, is_met: bool) -> None:
        """One image was finished, within the server's latency objective or not."""
        self._objective.labels("met" if is_met else "missed").inc()

    def observe_routed(self, engine: int) -> None:
        """One image was sent to engine `engine`, a number from 0."""
        self._routed.labels(str(engine)).inc()

    def observe_prediction(self, predicted_seconds: float, actual_seconds: float) -> None:
        """One image has finished `actual_seconds` (> 0) after it was routed; `predicted_seconds` were predicted."""
        self._prediction_error.observe(predicted_seconds / actual_seconds - 1)

    def observe_load(self, engine: int, load: LoadReport, stats: EngineStats | None) -> None:
        """Take over an engine's report."""
        self._engines.observe(engine, load, stats)

    def observe_retried(self) -> None:
        """One image or template is sent again, because its engine died."""
        self._retries.inc()

    def observe_restart(self, engine: int) -> None:
        """Engine `engine` is restarted."""
        self._engines.observe_restart(engine)

    def observe_lost(self, engine: int) -> None:
        """Engine `engine` has died."""
        self._engines.observe_lost(engine)

    def exposition(self, *, names_adapters: bool = True) -> bytes:
        """All metrics in Prometheus' text format (CONTENT_TYPE). names_adapters: whether the reader may know them."""
        names = self._adapter_names
        self._adapters.clear()
        self._adapters.labels(str(len(names)), ",".join(names) if names_adapters else "", "").set_function(time.time)
        return self._registry.exposition()

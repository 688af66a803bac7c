"""Metrics as a scraper sees them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from core.messages import CacheStats, LoadReport
from engine.metrics import Metrics


def values(metrics: Metrics) -> dict[str, float]:
    """Sample name, with its labels -> value."""
    text = metrics.exposition().decode()
    return {
        sample.name + "".join(f",{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def load(steps: int, requests: int, tokens: int, busy: float = 0.0, cache: CacheStats | None = None) -> LoadReport:
    return LoadReport(
        num_running=0,
        num_waiting=0,
        drain_seconds=1.5,
        stage_seconds={},
        resident_models=(),
        page_digest="",
        r_squared={"denoise": 0.97},
        steps=steps,
        batch_tokens=tokens,
        batch_requests=requests,
        tokens_skipped=10 * tokens,
        prime_chunks=steps,
        busy_seconds=busy,
        cache=cache,
    )


def cache_stats(hits: int = 0, primed: int = 0, used: int = 0) -> CacheStats:
    return CacheStats(
        hits={"host": hits, "disk": 2 * hits},
        misses=hits + 1,
        primed=primed,
        evictions={"host": hits},
        loads={"disk": 3},
        failed_loads=1,
        entries={"host": primed},
        used_bytes={"host": used},
        budget_bytes={"host": 1000},
        load_seconds=0.5,
    )


def test_queue_gauges_are_read_at_each_scrape_under_both_names() -> None:
    metrics, queue = Metrics(), [3, 5]
    metrics.watch_queue(lambda: queue[0], lambda: queue[1])
    for prefix in ("stencil", "vllm"):
        assert values(metrics)[f"{prefix}:num_requests_running"] == 3
        assert values(metrics)[f"{prefix}:num_requests_waiting"] == 5
    queue[0] = 4
    assert values(metrics)["vllm:num_requests_running"] == 4


def test_finished_aborted_failed_rejected() -> None:
    metrics = Metrics()
    metrics.observe_finished(
        "m",
        seconds=2.0,
        ms={"queue": 500, "denoise": 1000, "prime": 0.0},
        mask_ratio=0.3,
        cache="hit",
        num_inference_steps=8,
    )
    metrics.observe_aborted("m")
    metrics.observe_failed("m")
    metrics.observe_rejected("queue_full")
    seen = values(metrics)
    assert seen["stencil:e2e_request_latency_seconds_sum,m"] == 2.0
    assert seen["stencil:request_queue_time_seconds_sum,m"] == 0.5
    assert seen["stencil:request_stage_time_seconds_sum,m,denoise"] == 1.0
    assert "stencil:request_stage_time_seconds_sum,m,prime" not in seen
    assert seen["stencil:request_mask_ratio_sum,m"] == 0.3
    assert seen["stencil:request_cache_result_total,m,hit"] == 1
    assert [seen[f"stencil:request_success_total,{reason},m"] for reason in ("stop", "abort", "error")] == [1, 1, 1]
    assert seen["stencil:request_aborts_total,m"] == 1
    assert seen["stencil:request_rejects_total,queue_full"] == 1


def test_load_totals_become_counters_across_restarts_and_engines() -> None:
    metrics = Metrics()
    metrics.observe_load(load(2, 6, 600, 1.0))
    metrics.observe_load(load(3, 14, 700, 1.5))
    metrics.observe_load(load(1, 1, 10, 0.5))  # restarted
    metrics.observe_load(load(4, 4, 40), engine=1)
    seen = values(metrics)
    assert seen["stencil:steps_total"] == 8
    assert seen["stencil:tokens_computed_total"] == 750
    assert seen["stencil:worker_busy_seconds_total"] == 2.0
    assert seen["stencil:step_batch_size_count"] == 8
    assert seen["stencil:step_batch_size_sum"] == 19
    assert seen["stencil:predicted_drain_seconds"] == 3.0
    assert seen["stencil:tokens_skipped_total"] == 7500
    assert seen["stencil:prime_chunks_total"] == 8


def test_cache_totals_and_levels_by_tier() -> None:
    metrics = Metrics()
    metrics.observe_load(load(0, 0, 0, 1.0, cache_stats(hits=4, primed=5, used=300)))
    metrics.observe_load(load(0, 0, 0, 2.0, cache_stats(hits=6, primed=7, used=500)))
    metrics.observe_load(load(0, 0, 0, 0.5, cache_stats(hits=1, primed=2, used=100)))  # restarted
    metrics.observe_load(load(0, 0, 0, 0.5, cache_stats(used=10)), engine=1)
    metrics.observe_load(load(0, 0, 0, 0.5), engine=2)  # serves without
    seen = values(metrics)
    assert (seen["stencil:cache_hits_total,host"], seen["stencil:cache_hits_total,disk"]) == (7, 14)
    assert (seen["stencil:cache_misses_total"], seen["stencil:cache_primed_total"]) == (7 + 2 + 1, 9)
    assert seen["stencil:cache_evictions_total,host"] == 7
    assert seen["stencil:cache_loads_total,disk"] == 9
    assert (seen["stencil:cache_failed_loads_total"], seen["stencil:cache_load_seconds_total"]) == (3, 1.5)
    assert (seen["stencil:cache_entries,host"], seen["stencil:cache_used_bytes,host"]) == (2, 110)
    assert seen["stencil:cache_budget_bytes,host"] == 2000


def test_two_objects_share_nothing() -> None:
    first, second = Metrics(), Metrics()
    first.observe_rejected("not_ready")
    assert "stencil:request_rejects_total,not_ready" not in values(second)

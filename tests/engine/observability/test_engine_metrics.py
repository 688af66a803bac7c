"""The metrics that a scraper reads."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.costs.load_report import (
    CacheStats,
    EngineStats,
    LoadReport,
    QuarantinedModel,
    RankModel,
    RankStats,
    StepSample,
)
from engine.observability.metrics import Metrics

LOAD = LoadReport(num_received=9, num_running=2, num_waiting=3, drain_seconds=1.5)
MS = {"queue": 500, "preprocess": 1, "encode": 2, "prime": 0.0, "denoise": 1000, "decode": 3, "postprocess": 4}


def values(metrics: Metrics) -> dict[str, float]:
    """Sample name with its labels -> value."""
    text = metrics.exposition().decode()
    return {
        sample.name + "".join(f",{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def engine_stats(
    steps: int,
    tokens: int,
    busy: float = 0.0,
    *,
    cache: CacheStats | None = None,
    r_squared: dict[str, float] | None = None,
    samples: tuple[StepSample, ...] = (),
) -> EngineStats:
    return EngineStats(
        op_seconds={},
        ranks=(),
        r_squared=r_squared or {},
        steps=steps,
        batch_tokens=tokens,
        batch_requests=3 * steps,
        tokens_skipped=10 * tokens,
        prime_chunks=steps,
        busy_seconds={"denoise": busy, "prime": busy},
        cache=cache,
        recent_steps=samples,
    )


def cache_stats(hits: int = 0, primed: int = 0, used: int = 0) -> CacheStats:
    return CacheStats(
        hits={"host": hits, "disk": 2 * hits},
        misses=hits + 1,
        primed=primed,
        evictions={"host": hits},
        loads={"disk": 3},
        failed_loads=1,
        failed_stores=2,
        entries={"host": primed},
        used_bytes={"host": used},
        budget_bytes={"host": 1000},
        load_seconds=0.5,
    )


def finish(metrics: Metrics, ms: dict[str, float] = MS) -> None:
    metrics.observe_finished("m", seconds=2.0, ms=ms, mask_ratio=0.3, cache="hit", num_inference_steps=8)


def test_queue_gauges_are_read_at_each_scrape_under_both_names() -> None:
    metrics, queue = Metrics(), [3, 5]
    metrics.watch_queue(lambda: queue[0], lambda: queue[1])
    for prefix in ("stencil", "vllm"):
        assert values(metrics)[f"{prefix}:num_requests_running"] == 3
        assert values(metrics)[f"{prefix}:num_requests_waiting"] == 5
    queue[0] = 4
    assert values(metrics)["vllm:num_requests_running"] == 4


def test_image_processors_are_read_at_each_scrape() -> None:
    metrics, pool = (
        Metrics(),
        SimpleNamespace(num_waiting=4, num_running=2, num_deaths=0, num_retries=0, result_bytes=9),
    )
    metrics.watch_image_processors(pool, lambda: 1.5)
    assert values(metrics)["stencil:image_processor_deaths_total"] == 0
    pool.num_deaths, pool.num_retries = 2, 1
    seen = values(metrics)
    assert (seen["stencil:image_jobs_waiting"], seen["stencil:image_jobs_running"]) == (4, 2)
    assert (seen["stencil:image_processor_deaths_total"], seen["stencil:image_job_retries_total"]) == (2, 1)
    assert (seen["stencil:image_result_bytes"], seen["stencil:image_drain_seconds"]) == (9, 1.5)


def test_states_are_read_at_each_scrape() -> None:
    metrics, states = Metrics(), SimpleNamespace(used_bytes=0, num_recalled=0)
    metrics.watch_states(states)
    states.used_bytes, states.num_recalled = 4096, 2
    seen = values(metrics)
    assert (seen["stencil:approximate_cache_used_bytes"], seen["stencil:approximate_cache_hits_total"]) == (4096, 2)


def test_finished_aborted_failed_rejected() -> None:
    metrics = Metrics()
    finish(metrics)
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
    assert seen["stencil:request_rejects_total,queue_full"] == 1


def test_priming_is_counted_for_the_requests_it_was_done_for() -> None:
    metrics = Metrics()
    finish(metrics)
    finish(metrics, MS | {"prime": 7000})
    seen = values(metrics)
    assert seen["stencil:request_stage_time_seconds_count,m,prime"] == 1
    assert seen["stencil:request_stage_time_seconds_sum,m,prime"] == 7.0


def test_known_series_begin_at_zero() -> None:
    metrics = Metrics()
    metrics.expect(["m"], num_engines=2)
    before = values(metrics)
    finish(metrics)
    for engine in range(2):
        metrics.observe_load(engine, LOAD, engine_stats(1, 10, 1.0))
        metrics.observe_routed(engine)
    metrics.observe_rejected("not_ready")
    assert values(metrics).keys() == before.keys()
    counts = {value for name, value in before.items() if name.startswith("stencil:") and "_created" not in name}
    assert counts == {0.0}


def test_an_engine_that_has_left_leaves_what_it_has_done() -> None:
    """Its number may be another one's later, whose totals are added."""
    metrics = Metrics()
    metrics.expect(["m"], num_engines=1)
    for times in (1, 2):
        metrics.expect_engine(1)
        metrics.observe_load(1, LOAD, engine_stats(3, 700, 1.5))
        metrics.forget_engine(1)
        seen = values(metrics)
        gauges = ("engine_alive", "engine_requests_running", "engine_requests_waiting", "predicted_drain_seconds")
        assert not {f"stencil:{name},1" for name in gauges} & seen.keys()
        assert {f"stencil:{name},0" for name in gauges} <= seen.keys()
        assert seen["stencil:steps_total"] == 3 * times


def test_totals_become_counters_across_restarts_and_engines() -> None:
    metrics = Metrics()
    metrics.observe_load(0, LOAD, engine_stats(2, 600, 1.0))
    metrics.observe_load(0, LOAD, engine_stats(3, 700, 1.5))
    metrics.observe_load(0, LOAD, None)  # nothing but load
    metrics.observe_load(0, LOAD, engine_stats(1, 10, 0.5))  # restarted
    metrics.observe_load(1, LOAD, engine_stats(4, 40))
    seen = values(metrics)
    assert seen["stencil:steps_total"] == 8
    assert seen["stencil:tokens_computed_total"] == 750
    metrics.expect(["m"], num_engines=2)
    seen = values(metrics)
    stages = ("denoise", "prime", "decode")
    assert [seen[f"stencil:worker_busy_seconds_total,0,{stage}"] for stage in stages] == [2.0, 2.0, 0.0]
    assert [seen[f"stencil:worker_busy_seconds_total,1,{stage}"] for stage in stages] == [0.0, 0.0, 0.0]
    assert seen["stencil:tokens_skipped_total"] == 7500
    assert seen["stencil:prime_chunks_total"] == 8


def test_a_total_that_fell_in_one_stage_means_a_restart() -> None:
    metrics, first = Metrics(), engine_stats(2, 600)
    for seconds in ({"denoise": 1.0, "prime": 3.0}, {"denoise": 9.0, "prime": 2.0}, {"denoise": 10.0}):
        metrics.observe_load(0, LOAD, msgspec.structs.replace(first, busy_seconds=seconds))
    seen = values(metrics)
    assert [seen[f"stencil:worker_busy_seconds_total,0,{stage}"] for stage in ("denoise", "prime")] == [20.0, 5.0]


def test_load_by_engine() -> None:
    metrics = Metrics()
    metrics.observe_load(0, LOAD, None)
    metrics.observe_load(1, LoadReport(num_received=0, num_running=0, num_waiting=1, drain_seconds=0.5), None)
    metrics.observe_load(0, LoadReport(num_received=9, num_running=1, num_waiting=0, drain_seconds=0.25), None)
    seen = values(metrics)
    assert [seen[f"stencil:predicted_drain_seconds,{engine}"] for engine in (0, 1)] == [0.25, 0.5]
    assert [seen[f"stencil:engine_requests_running,{engine}"] for engine in (0, 1)] == [1, 0]
    assert [seen[f"stencil:engine_requests_waiting,{engine}"] for engine in (0, 1)] == [0, 1]


def test_a_lost_engine_has_no_load() -> None:
    metrics = Metrics()
    metrics.observe_load(0, LOAD, None)
    metrics.observe_load(1, LOAD, None)
    metrics.observe_lost(1)
    seen = values(metrics)
    assert [seen[f"stencil:engine_alive,{engine}"] for engine in (0, 1)] == [1, 0]
    for gauge in ("engine_requests_running", "engine_requests_waiting", "predicted_drain_seconds"):
        assert seen[f"stencil:{gauge},0"] > 0 == seen[f"stencil:{gauge},1"]


def test_each_step_is_seen_beside_its_prediction() -> None:
    metrics = Metrics()
    metrics.observe_load(0, LOAD, engine_stats(2, 0, samples=(StepSample(8, 900, 0.04, 0.05, 0.02),)))
    metrics.observe_load(1, LOAD, engine_stats(1, 0, samples=(StepSample(1, 100, 0.01, 0.01, 0.005),)))
    seen = values(metrics)
    assert (seen["stencil:step_batch_size_count"], seen["stencil:step_batch_size_sum"]) == (2, 9)
    assert seen["stencil:step_batch_size_bucket,1.0"] == 1
    assert seen["stencil:step_tokens_sum"] == 1000
    assert seen["stencil:step_time_seconds_sum"] == pytest.approx(0.05)
    assert seen["stencil:step_predicted_seconds_total"] == pytest.approx(0.06)
    assert seen["stencil:step_bound_seconds_total"] == pytest.approx(0.025)


def test_the_cost_models_worst_fit_is_shown() -> None:
    metrics, nan = Metrics(), float("nan")
    metrics.observe_load(0, LOAD, engine_stats(1, 0, r_squared={"denoise": 0.9, "prime": nan, "decode": nan}))
    metrics.observe_load(1, LOAD, engine_stats(1, 0, r_squared={"denoise": 0.97, "prime": 0.5}))
    seen = values(metrics)
    assert (seen["stencil:cost_model_r_squared,denoise"], seen["stencil:cost_model_r_squared,prime"]) == (0.9, 0.5)
    assert "stencil:cost_model_r_squared,decode" not in seen


def test_the_routers_choices_and_predictions_are_exported() -> None:
    metrics = Metrics()
    metrics.observe_routed(3)
    metrics.observe_prediction(predicted_seconds=1.5, actual_seconds=1.0)
    metrics.observe_prediction(predicted_seconds=0.5, actual_seconds=1.0)
    seen = values(metrics)
    assert seen["stencil:router_requests_total,3"] == 1
    errors = "stencil:router_prediction_error_ratio"
    assert (seen[f"{errors}_bucket,-0.75"], seen[f"{errors}_bucket,-0.5"]) == (0, 1)
    assert (seen[f"{errors}_bucket,0.3"], seen[f"{errors}_bucket,0.5"], seen[f"{errors}_count"]) == (1, 2, 2)


def test_cache_totals_and_levels_by_tier() -> None:
    metrics = Metrics()
    metrics.observe_load(0, LOAD, engine_stats(0, 0, 1.0, cache=cache_stats(hits=4, primed=5, used=300)))
    metrics.observe_load(0, LOAD, engine_stats(0, 0, 2.0, cache=cache_stats(hits=6, primed=7, used=500)))
    restarted = cache_stats(hits=1, primed=2, used=100)
    metrics.observe_load(0, LOAD, engine_stats(0, 0, 0.5, cache=restarted))
    metrics.observe_load(1, LOAD, engine_stats(0, 0, 0.5, cache=cache_stats(used=10)))
    metrics.observe_load(2, LOAD, engine_stats(0, 0, 0.5))  # serves without
    seen = values(metrics)
    assert (seen["stencil:cache_hits_total,host"], seen["stencil:cache_hits_total,disk"]) == (7, 14)
    assert (seen["stencil:cache_misses_total"], seen["stencil:cache_primed_total"]) == (7 + 2 + 1, 9)
    assert seen["stencil:cache_evictions_total,host"] == 7
    assert seen["stencil:cache_loads_total,disk"] == 9
    assert (seen["stencil:cache_failed_loads_total"], seen["stencil:cache_load_seconds_total"]) == (3, 1.5)
    assert seen["stencil:cache_failed_stores_total"] == 6
    assert (seen["stencil:cache_entries,host"], seen["stencil:cache_used_bytes,host"]) == (2, 110)
    assert seen["stencil:cache_budget_bytes,host"] == 2000


def test_refused_models_by_cause() -> None:
    metrics = Metrics()
    metrics.expect(["m", "n"], 2)
    refused = [QuarantinedModel("m", cause, 1, 0.0, 10.0) for cause in ("deaths", "owner_deaths", "owner_deaths")]
    for engine in (0, 1):
        stats = msgspec.structs.replace(engine_stats(2, 20), quarantine=tuple(refused))
        metrics.observe_load(engine, LOAD, stats)
        metrics.observe_load(engine, LOAD, stats)
    name = "stencil:model_quarantined"
    causes = ("deaths", "owner_deaths", "load")
    assert [values(metrics)[f"{name},{cause},,m"] for cause in causes] == [2, 4, 0]
    metrics.observe_load(0, LOAD, engine_stats(2, 20))
    assert [values(metrics)[f"{name},{cause},,m"] for cause in causes] == [1, 2, 0]
    metrics.observe_lost(1)
    assert [values(metrics)[f"{name},deaths,,{model}"] for model in "mn"] == [0, 0]


def test_refused_controlnets_are_told_by_name() -> None:
    metrics = Metrics()
    metrics.expect(["m"], 1)
    refused = QuarantinedModel("m", "deaths", 1, 0.0, 10.0, ("depth", "edges"))
    metrics.observe_load(0, LOAD, msgspec.structs.replace(engine_stats(2, 20), quarantine=(refused,)))
    name = "stencil:model_quarantined,deaths"
    assert [values(metrics)[f"{name},{nets},m"] for nets in ("depth,edges", "")] == [1, 0]


def test_the_cache_of_a_lost_engine_is_empty() -> None:
    metrics = Metrics()
    for engine in (0, 1):
        metrics.observe_load(engine, LOAD, engine_stats(2, 20, 1.0, cache=cache_stats(hits=4, primed=5, used=300)))
    metrics.observe_lost(1)
    seen = values(metrics)
    assert (seen["stencil:cache_used_bytes,host"], seen["stencil:cache_entries,host"]) == (300, 5)
    assert (seen["stencil:cache_hits_total,host"], seen["stencil:steps_total"]) == (8, 4)
    metrics.observe_load(1, LOAD, engine_stats(3, 20, 2.0, cache=cache_stats(hits=1, used=50)))  # restarted
    seen = values(metrics)
    assert (seen["stencil:cache_used_bytes,host"], seen["stencil:engine_alive,1"]) == (350, 1)
    assert (seen["stencil:cache_hits_total,host"], seen["stencil:steps_total"]) == (9, 7)


def test_two_objects_share_nothing() -> None:
    first, second = Metrics(), Metrics()
    first.observe_rejected("not_ready")
    assert values(second)["stencil:request_rejects_total,not_ready"] == 0


def test_models_are_counted_by_the_ranks_that_have_them_and_their_uses_since_start() -> None:
    """A dead engine's ranks have nothing; what it has done stays counted."""
    metrics = Metrics()
    metrics.expect(["a", "b"], 2)
    has, loads = RankModel("a", "resident", 2, 1, 10, 5.0), RankModel("b", "loading", 0, 0, 0, 0.0)
    ranks = (RankStats((), 0.0, models=(has, loads)), RankStats((), 0.0, models=(has,)))
    stats = msgspec.structs.replace(engine_stats(1, 1), ranks=ranks, model_hits={"a": 4}, model_loads={"a": 2, "b": 0})
    for engine in range(2):
        metrics.observe_load(engine, LOAD, stats)
    metrics.observe_load(1, LOAD, msgspec.structs.replace(stats, model_hits={"a": 5}))
    seen = values(metrics)
    assert [seen[f"stencil:model_ranks,{each}"] for each in ("a,resident", "b,loading", "b,resident")] == [4, 2, 0]
    assert [seen[f"stencil:model_{name}_total,{model}"] for name in ("hits", "loads") for model in "ab"] == [9, 0, 4, 0]
    metrics.observe_lost(1)
    after = values(metrics)
    assert [after[f"stencil:model_ranks,{each}"] for each in ("a,resident", "b,loading")] == [2, 1]
    assert after["stencil:model_hits_total,a"] == 9

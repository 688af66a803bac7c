"""The simulator: every edit is answered once, times add up, and a run can be repeated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulation.cluster import MESSAGE_SECONDS, Cluster
from benchmarks.simulation.machine import IMAGE_TOKENS, TEXT_TOKENS
from benchmarks.simulation.masks import MASKS
from benchmarks.simulation.scenario import MIX, REFERENCE, make_trace
from core.config import CacheConfig

SMALL = replace(REFERENCE, num_engines=2, num_edits=40)
SMALL_MIX = replace(MIX, num_engines=2, num_edits=60, num_warm_up=20, num_templates=30, load=0.9)


def test_a_lone_edit_takes_its_steps() -> None:
    scenario = replace(SMALL, num_edits=1)
    (edit,) = make_trace(scenario, 0)
    outcome = Cluster(scenario, "mask-aware", 0).run()
    steps = 28 * (0.006 + 0.1 * (edit.spec.active.size + TEXT_TOKENS) / 4608)
    assert outcome.latencies == [pytest.approx(steps + 2 * MESSAGE_SECONDS)]
    assert outcome.predicted == [pytest.approx(steps, rel=0.01)]
    assert sum(outcome.busy_seconds) == pytest.approx(steps)


def test_every_edit_is_answered_once_and_work_is_conserved() -> None:
    trace, outcome = make_trace(SMALL, 3), Cluster(SMALL, "least-requests", 3).run()
    assert len(outcome.latencies) == len(trace) == 40
    tokens = sum(28 * (edit.spec.active.size + TEXT_TOKENS) for edit in trace)
    least, most = 0.1 * tokens / 4608, 0.1 * tokens / 4608 + 0.006 * 28 * 40
    assert least < sum(outcome.busy_seconds) < most, "all tokens once, and a step's constant at most once an edit"
    assert all(busy <= outcome.seconds for busy in outcome.busy_seconds)
    assert set(outcome.engines) == {0, 1}


@pytest.mark.parametrize("policy", ["mask-aware", "batch-cost"])
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    first, second = (Cluster(SMALL_MIX, policy, 1).run() for _ in range(2))  # type: ignore[arg-type]
    assert first.latencies == second.latencies
    assert first.engines == second.engines
    assert make_trace(SMALL_MIX, 1) != make_trace(SMALL_MIX, 2)


def test_cold_templates_are_primed() -> None:
    cluster = Cluster(SMALL_MIX, "round-robin", 0)
    outcome = cluster.run()
    assert len(outcome.latencies) == 60
    assert outcome.primed > 30
    for index, engine in enumerate(cluster.engines):
        engine.scheduler.check_integrity()
        known = engine.scheduler.cache.stats().entries["device"]
        assert known > 0
        assert cluster.fleet.num_requests[index] == 0, "the router knows that all is done"


def test_pages_that_made_room_come_back_from_host_memory() -> None:
    cache = CacheConfig(device_bytes=30 * 10**9, host_bytes=90 * 10**9)  # room for 6 templates, and for 20
    scenario = replace(SMALL_MIX, num_engines=1, num_edits=80, num_templates=12, zipf=0.5, cache=cache)
    outcome = Cluster(scenario, "round-robin", 0).run()
    assert outcome.loaded > 0
    assert outcome.primed < 3 * 80


def test_affinity_saves_priming() -> None:
    blind, aware = (Cluster(SMALL_MIX, policy, 0).run() for policy in ("least-requests", "mask-aware"))  # type: ignore[arg-type]
    assert aware.primed < blind.primed


@pytest.mark.parametrize(
    ("masks", "mean"), [("reference", 0.15), ("production", 0.11), ("public", 0.19), ("tryon", 0.35)]
)
def test_masks_have_the_means_they_are_named_for(masks: str, mean: float) -> None:
    ratios = MASKS[masks](np.random.default_rng(0), 100_000)
    assert ratios.mean() == pytest.approx(mean, abs=0.01)
    assert ratios.min() >= 0
    assert ratios.max() <= 1


def test_capacity_is_that_of_full_batches_with_all_pages_there() -> None:
    mean = MASKS["reference"](np.random.default_rng(0), 200_000).mean() * IMAGE_TOKENS + TEXT_TOKENS
    assert 8 * 8 / (28 * (0.006 + 8 * 0.1 * mean / 4608)) == pytest.approx(REFERENCE.capacity)


def test_engines_of_several_ranks_are_predicted_and_used_as_such() -> None:
    scenario = replace(SMALL, num_engines=3, ranks=(1, 4, 1), num_edits=150, load=0.6)
    aware, fewest = (Cluster(scenario, policy, 0).run() for policy in ("mask-aware", "least-requests"))  # type: ignore[arg-type]
    errors = [abs(1 - said / took) for said, took in zip(aware.predicted, aware.latencies, strict=True) if said]
    assert np.median(errors) < 0.02
    assert np.mean(aware.latencies) < 0.9 * np.mean(fewest.latencies)

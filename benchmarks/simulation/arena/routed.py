"""The contests `routing`: fleets behind the mask-aware router, by the scheduling policy of their engines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean

from benchmarks.report import percentile
from benchmarks.simulation.arena.contest import MEAN, P95, Contest, Values
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.compared import FORMER, OURS, make
from benchmarks.simulation.scenario import SCENARIOS

POLICIES = (OURS, *FORMER)

FLEETS = {
    name: replace(SCENARIOS[name], num_engines=4, num_edits=300, num_warm_up=warm_up)
    for name, warm_up in (("reference", 50), ("mix", 100), ("bursty", 50))
}


def contests() -> list[Contest]:
    return [Contest(name, partial(_play, name), POLICIES, (MEAN, P95)) for name in FLEETS]


def _play(name: str, policy: str, seed: int) -> Values:
    latencies = Cluster(FLEETS[name], "mask-aware", seed, scheduling=partial(make, policy)).run().latencies
    return {MEAN: fmean(latencies), P95: percentile(latencies, 0.95)}

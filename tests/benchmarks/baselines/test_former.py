"""The former policies decide as they did: figures of short runs, recorded when the engine still had them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import msgspec
import pytest

from benchmarks.baselines.former.elastic import Elastic
from benchmarks.baselines.former.goodput import Goodput
from benchmarks.baselines.former.step_batching import StepBatching
from benchmarks.simulation import module_engine, video_engine
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.module_trace import Cell, ModuleTrace
from benchmarks.simulation.published import DATA
from benchmarks.simulation.scenario import SCENARIOS, Scenario
from benchmarks.simulation.video_load import VideoLoad
from core.costs.load_report import LoadReport
from core.messages.engine import EngineRequest, Failed, Finished, Output
from core.scheduling.policies.policy import SchedulingPolicy

SLO = 4.0
"""Seconds."""


class AimingCluster(Cluster):
    """All edits have an objective of SLO seconds, and are admitted."""

    def count(self) -> tuple[int, int]:
        """(edits in time, edits that are given up)"""
        self._due: dict[int, float] = {}
        self._num_lost = 0
        self.run_trace()
        return sum(end <= self._due[index] for index, end in self._latencies.items()), self._num_lost

    def _route(self, edit: EngineRequest) -> None:
        self._due[int(edit.request_id)] = edit.arrival + SLO
        super()._route(msgspec.structs.replace(edit, objective=edit.arrival + SLO))

    def _hear(self, engine: int, report: LoadReport, outputs: tuple[Output, ...]) -> None:
        self._num_lost += sum(isinstance(each, Failed) for each in outputs)
        super()._hear(engine, report, tuple(each for each in outputs if isinstance(each, Finished)))


def short(name: str, slo: float) -> tuple[ModuleTrace, Cell]:
    """The first requests of a file, with a fifth of their steps, and that much faster."""
    trace = ModuleTrace.read(DATA / f"{name}.json")
    cell = next(each for each in trace.cells() if each.slo == slo)
    arrivals = [0.0, *trace.arrivals(cell)[:60]]
    gaps = [(later - earlier) / 5 for earlier, later in pairwise(arrivals)]
    steps = [steps // 5 for steps in trace.steps[:60]]
    key = cell.name.rpartition(" ")[0]
    return msgspec.structs.replace(trace, num_requests=60, steps=steps, intervals_seconds={key: gaps}), cell


@pytest.mark.parametrize(
    ("name", "policy", "in_time"),
    [
        ("dit_s2_256", "former goodput", 51),
        ("dit_s2_256", "former step_batching", 45),
        ("sd15_256", "former goodput", 51),
        ("sd15_256", "former step_batching", 29),
    ],
)
def test_published_requests_in_time(name: str, policy: str, in_time: int) -> None:
    assert module_engine.serve(*short(name, 1.5), policy).goodput == in_time


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 9.901109880585533), (1.0, 3.434107901542785)])
def test_latencies_of_videos(rate: float, seconds: float) -> None:
    load = VideoLoad.read()
    arrivals = load.arrivals(load.mixes[0], 24, rate, 1)
    served = video_engine.serve(load, load.mixes[0], arrivals, "former elastic", 8)
    assert fmean(served.latencies) == pytest.approx(seconds)


REFERENCE = replace(SCENARIOS["reference"], num_engines=1, num_edits=150, load=1.3)
MIX = replace(SCENARIOS["mix"], num_engines=2, num_edits=150, num_warm_up=0, load=1.0)


@pytest.mark.parametrize(
    ("policy", "scenario", "seconds"),
    [
        (StepBatching, REFERENCE, 12.080425249502312),
        (Goodput, REFERENCE, 14.981109971724557),
        (Elastic, REFERENCE, 12.080425249502312),
        (StepBatching, MIX, 8.71485262714493),
        (Goodput, MIX, 9.982786131457761),
    ],
)
def test_latencies_behind_a_router(policy: Callable[[], SchedulingPolicy], scenario: Scenario, seconds: float) -> None:
    latencies = Cluster(scenario, "mask-aware", 1, scheduling=policy).run().latencies
    assert fmean(latencies) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("policy", "counts"),
    [(StepBatching, (122, 27)), (Goodput, (115, 35)), (Elastic, (122, 27))],
)
def test_edits_that_are_too_late_are_given_up(policy: Callable[[], SchedulingPolicy], counts: tuple[int, int]) -> None:
    assert AimingCluster(REFERENCE, "mask-aware", 1, scheduling=policy).count() == counts

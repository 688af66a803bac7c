"""Admission control and deadlines keep up goodput at twice the capacity, in simulated time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.machine import Machine
from benchmarks.simulation.scenario import MODEL, REFERENCE, Scenario, make_trace
from core.costs.load_report import LoadReport
from core.costs.prediction_margin import PredictionMargin
from core.graph.work import Work
from core.messages.engine import EngineRequest, Finished
from core.messages.worker import Batch
from core.routing.admission import Terms, judge
from core.routing.policies import outlook
from core.routing.request_shape import RequestShape
from core.scheduling.endings import Output

LONE = 28 * (0.006 + 0.1 * (0.15 * 4096 + 512) / 4608)
"""Seconds that a mean edit takes alone."""


@dataclass(frozen=True)
class Goodput:
    """rate: edits sent per second. goodput: edits per second that were done within the objective, until the last
    one had ended. ends: how many were in time, late, refused, dropped.
    """

    rate: float
    goodput: float
    ends: Counter[str] = field(default_factory=Counter)
    margin: float = 1.0


class OverloadedCluster(Cluster):
    """One run of a scenario under an objective of `slo_seconds`; None: nothing is refused."""

    def __init__(self, scenario: Scenario, slo_seconds: float | None, seed: int) -> None:
        super().__init__(scenario, "mask-aware", seed)
        self._slo = slo_seconds
        self._margin = PredictionMargin()
        self._ends: dict[int, str] = {}
        self._arrivals: dict[int, float] = {}
        self._predictions: dict[int, float] = {}

    def measure(self, slo_seconds: float) -> Goodput:
        """Run it, and count what was done within so many seconds."""
        trace = make_trace(self.scenario, self.seed)
        self.run_trace()
        ends = Counter(
            "in time" if end == "finished" and self._latencies[index] <= slo_seconds else end
            for index, end in self._ends.items()
        )
        seconds = self.clock.now - self._started
        assert sum(ends.values()) == len(trace), "every edit ends once"
        return Goodput(len(trace) / trace[-1].arrival, ends["in time"] / seconds, ends, self._margin.high)

    def _route(self, edit: EngineRequest) -> None:
        index, now = int(edit.request_id), self.clock.now
        self._arrivals[index] = now
        if self._slo is not None:
            ahead = outlook(RequestShape.of_request(edit, MODEL), self.fleet, self._policy, now)
            assert ahead is not None
            verdict = judge(ahead, Terms(None, self._slo), self._margin)
            if verdict.refused:
                self._ends[index] = "refused"
                return
            self._predictions[index] = ahead.seconds
            if verdict.has_objective:
                edit = msgspec.structs.replace(edit, objective=now + self._slo)
        super()._route(edit)

    def _hear(self, engine: int, report: LoadReport, outputs: tuple[Output, ...]) -> None:
        self.fleet.observe(engine, report, self.clock.now)
        for output in outputs:
            if not output.request_id.isdecimal():
                continue
            index = int(output.request_id)
            self._latencies[index] = seconds = self.clock.now - self._arrivals[index]
            self._ends[index] = "finished" if isinstance(output, Finished) else "dropped"
            if index in self._predictions:
                assert self._slo is not None
                taken = seconds if isinstance(output, Finished) else max(seconds, self._slo)
                self._margin.observe(self._predictions[index], taken)


@dataclass(frozen=True)
class SlowMachine(Machine):
    """A worker that is slower than its cost model was taught, as when other programs use the same cores."""

    bias: float = 1.4

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        return self.bias * super().batch_seconds(batch, work)


def measure(load: float, slo: float, *, is_refusing: bool = True, machine: Machine | None = None) -> Goodput:
    scenario = replace(REFERENCE, num_engines=1, num_edits=80, load=load, machine=machine or REFERENCE.machine)
    return OverloadedCluster(scenario, slo if is_refusing else None, seed=1).measure(slo)


def test_twice_the_load_keeps_the_goodput() -> None:
    slo = 8 * LONE
    knee, overload = measure(1.0, slo), measure(2.0, slo)
    assert overload.goodput >= 0.9 * knee.goodput
    assert overload.ends["refused"] > 20
    assert overload.ends["finished"] <= 2, "hardly any is late"


def test_without_admission_control_the_goodput_collapses() -> None:
    """Shows what admission control is for, and that the other test could fail."""
    slo = 8 * LONE
    assert measure(2.0, slo, is_refusing=False).goodput < 0.6 * measure(2.0, slo).goodput


def test_predictions_that_are_far_too_short_are_made_up_for() -> None:
    slo, machine = 8 * 1.4 * LONE, SlowMachine()
    knee, overload = measure(1.0 / 1.4, slo, machine=machine), measure(2.0 / 1.4, slo, machine=machine)
    assert overload.goodput >= 0.9 * knee.goodput
    assert overload.margin > 1.4


@pytest.mark.parametrize("times", [0.5, 20.0])
def test_a_lightly_loaded_server_refuses_no_edit(times: float) -> None:
    """Even an objective that no edit can meet does not stop an idle server from serving."""
    goodput = measure(0.001, times * LONE)
    assert set(goodput.ends) <= {"in time", "finished"}

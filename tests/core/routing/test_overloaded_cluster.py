"""Edits that are too late are dropped, which keeps up the goodput at twice the capacity, in simulated time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from benchmarks.simulation.machine import Machine
from benchmarks.simulation.overloaded_cluster import Goodput, OverloadedCluster
from benchmarks.simulation.scenario import REFERENCE
from core.graph.work import Work
from core.messages.worker import Batch

LONE = 28 * (0.006 + 0.1 * (0.15 * 4096 + 512) / 4608)
"""Seconds that a mean edit takes alone."""


@dataclass(frozen=True)
class SlowMachine(Machine):
    """A worker that is slower than its cost model was taught, as when other programs use the same cores."""

    bias: float = 1.4

    def batch_seconds(self, batch: Batch, work: Work) -> float:
        return self.bias * super().batch_seconds(batch, work)


def measure(load: float, slo: float, *, has_objective: bool = True, machine: Machine | None = None) -> Goodput:
    scenario = replace(REFERENCE, num_engines=1, num_edits=80, load=load, machine=machine or REFERENCE.machine)
    return OverloadedCluster(scenario, slo if has_objective else None, seed=1).measure(slo)


def test_twice_the_load_keeps_the_goodput() -> None:
    slo = 8 * LONE
    knee, overload = measure(1.0, slo), measure(2.0, slo)
    assert overload.goodput >= 0.9 * knee.goodput
    assert overload.ends["dropped"] > 10
    assert overload.ends["finished"] <= 2, "hardly any is late"


def test_without_an_objective_the_goodput_collapses() -> None:
    """Shows what it is good for to drop edits that are late, and that the other test could fail."""
    slo = 8 * LONE
    assert measure(2.0, slo, has_objective=False).goodput < 0.6 * measure(2.0, slo).goodput


def test_predictions_that_are_far_too_short_are_made_up_for() -> None:
    slo, machine = 8 * 1.4 * LONE, SlowMachine()
    knee, overload = measure(1.0 / 1.4, slo, machine=machine), measure(2.0 / 1.4, slo, machine=machine)
    assert overload.goodput >= 0.9 * knee.goodput


@pytest.mark.parametrize("times", [0.5, 20.0])
def test_a_lightly_loaded_server_serves_every_edit(times: float) -> None:
    """Even an objective that no edit can meet does not stop an idle server from serving."""
    goodput = measure(0.001, times * LONE)
    assert set(goodput.ends) <= {"in time", "finished"}

"""Cores: how long what other processes do takes, and what they do first."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.cores import Cores


def ends(tasks: list[tuple[str, float]], num_cores: float, num_ranks: int = 0) -> list[tuple[str, float]]:
    """(name, end) of tasks of one second with these orders, given at once to two processes."""
    clock, found = Clock(), list[tuple[str, float]]()
    cores = Cores(clock, num_cores, lambda: num_ranks, num_others=2)
    for name, order in tasks:
        cores.run(1.0, lambda name=name: found.append((name, clock.now)), order)  # type: ignore[misc]
    clock.run()
    return found


def test_each_process_does_one_task_at_a_time_and_of_those_that_wait_the_first_in_order() -> None:
    tasks = [("a", 3.0), ("b", 3.0), ("c", 4.0), ("d", 5.0), ("e", 2.0), ("f", 4.0), ("g", -inf)]
    found = ends(tasks, num_cores=inf)
    assert [name for name, _ in found] == ["a", "b", "g", "e", "c", "f", "d"]
    assert [end for _, end in found] == pytest.approx([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0])


@pytest.mark.parametrize(("num_cores", "num_ranks", "seconds"), [(2.0, 0, 1.0), (2.0, 2, 2.0), (1.0, 1, 3.0)])
def test_tasks_share_the_cores_with_ranks(num_cores: float, num_ranks: int, seconds: float) -> None:
    found = ends([("a", 0.0), ("b", 0.0)], num_cores, num_ranks)
    assert [end for _, end in found] == pytest.approx([seconds, seconds])

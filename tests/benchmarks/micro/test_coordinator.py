"""The benchmark of the coordinator: all ranks have work, and all nodes of it are counted."""

from __future__ import annotations

import pytest

from benchmarks.micro.coordinator import measure
from benchmarks.simulation.lego.numbers import Numbers


def test_ranks_are_busy_and_nodes_are_counted() -> None:
    found, numbers = measure("sd35l", 2, lengths=1.0), Numbers.read()
    alone = numbers.solo_seconds["sd35l"]
    assert found.elapsed == pytest.approx(alone, rel=0.2)
    assert found.busy > 1.5 * found.elapsed
    assert found.num_nodes >= found.busy / alone * numbers.steps["sd35l"]
    assert 0 < found.seconds < 0.5 * found.elapsed

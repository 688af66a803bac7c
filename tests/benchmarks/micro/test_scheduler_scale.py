"""The benchmark of the engine's loop: its policy keeps every rank busy, and all nodes are counted."""

from __future__ import annotations

import asyncio

from benchmarks.micro.scheduler_scale import SLOTS, Loop, time_passes


def test_every_rank_has_its_requests_and_the_rest_wait() -> None:
    loop = Loop(6, 20)
    turns = asyncio.run(loop.run(100))
    assert len(turns) == 100
    assert max(turn.num_nodes for turn in turns) >= SLOTS
    assert all(turn.num_batches <= turn.num_nodes for turn in turns)
    assert all(turn.seconds > 0 for turn in turns)
    scheduler = loop._core._scheduler
    scheduler.check_integrity()
    running, waiting = scheduler.counts
    assert running == 6 * SLOTS
    assert 20 - 2 * SLOTS <= waiting <= 20


def test_the_passes_of_a_policy_are_timed() -> None:
    passes = time_passes("default", 4, 4, 40)
    assert len(passes) == 40
    assert all(seconds > 0 for seconds in passes)

"""How much longer ranks take than their batches."""

from __future__ import annotations

import pytest

from core.graph.op import OpWork
from core.messages.worker import Batch, BatchResult, Item
from core.scheduling.policies.planner.pauses import Pauses


def note(pauses: Pauses, request: str, started: float, seconds: float = 1.0, rank: int = 0) -> None:
    batch = Batch(0, "denoise", (rank,), (Item(request, "denoise", "m", OpWork(), ()),))
    pauses.note(batch, BatchResult(0, rank, started, seconds, ()))


def test_pauses_between_batches_of_a_request_are_learnt() -> None:
    pauses = Pauses()
    for step in range(500):
        note(pauses, "a", 1.25 * step)
    assert pauses.stretch == pytest.approx(1.25, rel=0.01)


def test_a_rank_that_had_nothing_to_do_made_no_pause() -> None:
    pauses = Pauses()
    for step in range(10):
        note(pauses, str(step), 1.5 * step)  # each of another request
        note(pauses, "far apart", 100.0 * step, rank=1)
        note(pauses, "one rank", 1.5 * step, rank=2 + step % 2)
    assert pauses.stretch == 1.0

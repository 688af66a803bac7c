"""How much longer ranks take than their batches."""

from __future__ import annotations

from itertools import count

import pytest

from core.graph.op import OpWork
from core.messages.worker import Batch, BatchResult, Item
from core.scheduling.policies.planner.pauses import Pauses

IDS = count()


def note(pauses: Pauses, request: str, started: float, seconds: float = 1.0, ranks: tuple[int, ...] = (0,)) -> None:
    batch = Batch(next(IDS), "denoise", ranks, (Item(request, "denoise", "m", OpWork(), ()),))
    pauses.note(batch, BatchResult(batch.id, ranks[0], started, seconds, ()))


def test_pauses_between_batches_of_a_request_are_learnt() -> None:
    pauses = Pauses()
    for step in range(500):
        note(pauses, "a", 1.25 * step)
    assert pauses.stretch == pytest.approx(1.25, rel=0.01)


def test_a_rank_that_had_nothing_to_do_made_no_pause() -> None:
    pauses = Pauses()
    for step in range(10):
        note(pauses, str(step), 1.5 * step)  # each of another request
        note(pauses, "far apart", 100.0 * step, ranks=(1,))
        note(pauses, "one rank", 1.5 * step, ranks=(2 + step % 2,))
    assert pauses.stretch == 1.0


def test_what_a_request_or_a_rank_does_meanwhile_is_no_pause() -> None:
    """A request works for its steps on another rank between them; another one waits for a second rank."""
    pauses = Pauses()
    for step in range(10):
        note(pauses, "a", 1.5 * step)
        note(pauses, "a", 1.5 * step + 1.0, 0.5, ranks=(1,))
        note(pauses, "b", 2.0 * step, ranks=(2,) if step % 2 else (2, 3))
        note(pauses, str(step), 2.0 * step + 1.0, ranks=(3,))
    assert pauses.stretch == 1.0

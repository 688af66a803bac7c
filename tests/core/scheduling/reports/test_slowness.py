"""How much longer steps take than predicted."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from core.graph.op import OpWork
from core.graph.work import Work
from core.messages.worker import Batch, BatchResult, Item
from core.scheduling.ranks.in_flight import Flight
from core.scheduling.reports.slowness import Slowness
from core.scheduling.requests.bindings import ModelKeys

IDS = count()


def note(
    slowness: Slowness,
    request: str,
    started: float,
    seconds: float = 1.0,
    *,
    ranks: tuple[int, ...] = (0,),
    predicted: float = 1.0,
    is_step: bool = True,
    is_usual: bool = True,
) -> None:
    batch = Batch(next(IDS), "denoise", ranks, (Item(request, "denoise", "m", OpWork(), ()),))
    flight = Flight(batch, ModelKeys("sd", "cpu", ()), Work.of([1]), predicted, is_step=is_step)
    slowness.note(flight, BatchResult(batch.id, ranks[0], started, seconds, ()), is_usual=is_usual)


@pytest.mark.parametrize(("predicted", "value"), [(1.0, 1.25), (1.25, 1.0), (0.8, 1.5625), (0.1, 2.0)])
def test_pauses_between_steps_of_a_request_count_as_their_time(predicted: float, value: float) -> None:
    slowness = Slowness()
    for step in range(500):
        note(slowness, "a", 1.25 * step, predicted=predicted)
    assert slowness.value == pytest.approx(value, rel=0.01)


def test_a_rank_that_had_nothing_to_do_made_no_pause() -> None:
    slowness = Slowness()
    for step in range(10):
        note(slowness, str(step), 1.5 * step)  # each of another request
        note(slowness, "far apart", 100.0 * step, ranks=(1,))
        note(slowness, "one rank", 1.5 * step, ranks=(2 + step % 2,))
    assert slowness.value == 1.0


def test_what_a_request_or_a_rank_does_meanwhile_is_no_pause() -> None:
    """A request works for its steps on another rank between them; another one waits for a second rank."""
    slowness = Slowness()
    for step in range(10):
        note(slowness, "a", 1.5 * step)
        note(slowness, "a", 1.5 * step + 1.0, 0.5, ranks=(1,))
        note(slowness, "b", 2.0 * step, ranks=(2,) if step % 2 else (2, 3))
        note(slowness, str(step), 2.0 * step + 1.0, ranks=(3,))
    assert slowness.value == 1.0


@pytest.mark.parametrize("what", [{"is_step": False}, {"is_usual": False}, {"predicted": 0.0}])
def test_only_usual_steps_of_known_time_count(what: dict[str, Any]) -> None:
    slowness = Slowness()
    for step in range(10):
        note(slowness, "a", 2.0 * step, 1.5, **what)
    assert slowness.value == 1.0

"""ImageBacklog: how many seconds of queued image work come before a new edit's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.costs.image_backlog import BacklogShare, ImageBacklog
from core.scheduling.requests.fair_queue import counts_as_due


def share(
    owner: str, seconds: float, *, priority: int = 0, arrival: float = 0.0, due: float | None = None
) -> BacklogShare:
    return BacklogShare(owner, priority, counts_as_due(arrival, due, priority), seconds)


@pytest.fixture
def backlog() -> ImageBacklog:
    """Many edits of one owner."""
    backlog = ImageBacklog()
    for index in range(8):
        backlog.set(f"a{index}", share("a", 10.0, arrival=float(index)))
    return backlog


def test_an_owner_waits_for_its_own_work(backlog: ImageBacklog) -> None:
    assert backlog.before(share("a", 1.0, arrival=9.0)) == 80.0
    assert backlog.before(share("a", 1.0, arrival=9.0, priority=-1)) == 0.0
    assert backlog.before(share("a", 1.0, arrival=9.0, due=14.0)) == 0.0, "it is due before all others"


def test_another_owner_waits_for_as_much_as_it_wants_itself(backlog: ImageBacklog) -> None:
    assert backlog.before(share("b", 0.1, arrival=9.0)) == pytest.approx(0.1)
    assert backlog.before(share("b", 100.0, arrival=9.0)) == 80.0
    backlog.set("b0", share("b", 5.0))
    assert backlog.before(share("b", 1.0, arrival=9.0)) == 5.0 + 6.0


def test_classes_of_others_count_whole_or_not_at_all(backlog: ImageBacklog) -> None:
    assert backlog.before(share("b", 1.0, priority=1)) == 80.0
    assert backlog.before(share("b", 1.0, priority=-1)) == 0.0


def test_finished_and_dropped_work_does_not_count(backlog: ImageBacklog) -> None:
    backlog.set("a0", share("a", 4.0))
    backlog.set("a1", share("a", 0.0))
    backlog.drop("a2")
    backlog.drop("a2")
    assert backlog.seconds == 54.0
    for index in range(8):
        backlog.drop(f"a{index}")
    assert not backlog


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 9.0), st.integers(-1, 1)), max_size=12))
def test_never_more_than_all_there_is(shares: list[tuple[str, float, int]]) -> None:
    backlog = ImageBacklog()
    for index, (owner, seconds, priority) in enumerate(shares):
        backlog.set(str(index), share(owner, seconds, priority=priority))
    assert 0.0 <= backlog.before(share("a", 1.0, arrival=1.0)) <= backlog.seconds + 1e-9

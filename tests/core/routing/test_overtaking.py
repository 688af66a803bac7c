"""Which requests in an engine's queue a new request overtakes, computed from the load report."""

from __future__ import annotations

from core.config import CLASS_SECONDS
from core.costs.load_report import RequestLoad
from core.routing.overtaking import staying_ahead


def load(owner: str, seconds: float = 10.0, *, priority: int = 0, is_running: bool = False) -> RequestLoad:
    return RequestLoad(10, seconds / 10, 0.0, priority, is_running, 0.0, owner)


def test_with_one_owner_an_equal_class_waits_its_turn_and_lower_classes_are_overtaken() -> None:
    loads = [load("a", is_running=True, priority=1), load("a"), load("a", priority=1)]
    assert staying_ahead(loads, "a", 0, 0.0) == [0, 1]
    assert staying_ahead(loads, "a", 1, 0.0) == [0, 1, 2]
    assert staying_ahead(loads, "a", 0, CLASS_SECONDS) == [0, 1, 2], "it has waited for long"


def test_another_owners_flood_is_ahead_by_one_request() -> None:
    flood = [load("a", is_running=True), *(load("a") for _ in range(20))]
    assert staying_ahead(flood, "b", 0, 0.0) == [0, 1]


def test_an_owner_that_wants_much_waits_for_as_much_of_the_other() -> None:
    loads = [load("a"), load("b"), load("a"), load("b"), load("a"), load("a"), load("a")]
    assert staying_ahead(loads, "b", 0, 0.0) == [0, 1, 2, 3, 4]


def test_another_owners_class_counts_before_fairness() -> None:
    loads = [load("a", priority=-1), load("a", priority=-1), load("a", priority=1)]
    assert staying_ahead(loads, "b", 0, 0.0) == [0, 1]

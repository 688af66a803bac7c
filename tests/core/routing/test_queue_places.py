"""Who leaves a full queue: shared between owners, no owner ends with fewer places than the one it left them to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from core.routing.queue_places import Newcomer, displaced_by


@dataclass(frozen=True)
class Request:
    owner: str
    num_images: int = 1
    priority: float = 0
    arrival: float = 0.0
    can_be_displaced: bool = True


def holds(requests: list[Request]) -> Counter[str]:
    return sum((Counter({each.owner: each.num_images}) for each in requests), Counter())


def line(owner: str, count: int, **fields: float) -> list[Request]:
    """Requests of one owner, the latest last."""
    return [Request(owner, arrival=arrival, **fields) for arrival in range(count)]


REQUESTS = st.lists(
    st.builds(
        Request,
        owner=st.sampled_from("abc"),
        num_images=st.integers(1, 3),
        priority=st.integers(-2, 2),
        arrival=st.floats(0, 100),
        can_be_displaced=st.booleans(),
    ),
    max_size=20,
)
NEWCOMERS = st.builds(
    Newcomer, owner=st.sampled_from("abcd"), num_images=st.integers(1, 3), priority=st.integers(-2, 2)
)


def admit(newcomer: Newcomer, requests: list[Request], max_queue: int) -> tuple[list[Request], list[Request]] | None:
    """Who leaves, and who is in the queue then, the newcomer last; None where it is refused."""
    missing = sum(each.num_images for each in requests) + newcomer.num_images - max_queue
    leaving = displaced_by(newcomer, requests, missing)
    if leaving is None:
        return None
    staying = list(requests)
    for each in leaving:
        staying.remove(each)  # raises where one leaves twice
    return leaving, [*staying, Request(newcomer.owner, newcomer.num_images, newcomer.priority, 1000.0)]


@given(REQUESTS, NEWCOMERS, st.integers(0, 2))
def test_others_keep_at_least_as_many_places_as_the_newcomers_owner_has_then(
    requests: list[Request], newcomer: Newcomer, num_free: int
) -> None:
    max_queue = holds(requests).total() + num_free
    answer = admit(newcomer, requests, max_queue)
    if answer is None:
        return
    leaving, queue = answer
    assert all(each.can_be_displaced for each in leaving)
    assert all(each.priority > newcomer.priority for each in leaving if each.owner == newcomer.owner)
    held = holds(queue)
    assert held.total() <= max_queue
    if leaving:
        assert held.total() > max_queue - leaving[-1].num_images, "no more leave than have to"
    for owner in {each.owner for each in leaving} - {newcomer.owner}:
        assert held[owner] >= held[newcomer.owner]


@given(REQUESTS, NEWCOMERS, st.integers(1, 60))
def test_with_one_owner_only_lower_classes_leave_the_lowest_and_latest_first(
    requests: list[Request], newcomer: Newcomer, missing: int
) -> None:
    """The rule of a server without keys."""
    own = [each for each in requests if each.owner == newcomer.owner]
    lower = [each for each in own if each.can_be_displaced and each.priority > newcomer.priority]
    lower.sort(key=lambda each: (-each.priority, -each.arrival))
    expected: list[Request] | None = []
    for each in lower:
        if holds(expected).total() < missing:
            expected.append(each)
    if holds(expected).total() < missing:
        expected = None
    leaving = displaced_by(newcomer, own, missing)
    if expected is None or leaving is None:
        assert leaving == expected
    else:  # equals in class and arrival may leave in any order
        assert [(each.priority, each.arrival) for each in leaving] == [
            (each.priority, each.arrival) for each in expected
        ]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(-1, 1)), max_size=60))
def test_whoever_comes_the_queue_is_never_too_full_and_owners_do_not_push_each_other_out_in_turns(
    arrivals: list[tuple[str, int, int]],
) -> None:
    """All owners ask again for as long as any of them is admitted: that ends."""
    queue: list[Request] = []
    for owner, count, priority in arrivals:
        answer = admit(Newcomer(owner, count, priority), queue, 9)
        queue = queue if answer is None else answer[1]
        assert holds(queue).total() <= 9
    queue = [Request(each.owner, each.num_images, arrival=each.arrival) for each in queue]  # all of one class
    num_admitted = 0
    while answers := [answer for owner in "abc" if (answer := admit(Newcomer(owner, 1, 0), queue, 9))]:
        queue = answers[0][1]
        num_admitted += 1
        assert num_admitted < 30, "owners displace each other for ever"


def test_an_owner_that_fills_the_queue_leaves_places_to_another_until_both_hold_as_many() -> None:
    queue = line("heavy", 8)
    for _ in range(4):
        answer = admit(Newcomer("light", 1, 0), queue, 8)
        assert answer is not None
        ((gone,), queue) = answer
        assert gone.arrival == len([each for each in queue if each.owner == "heavy"]), "the latest of those left"
    assert holds(queue) == {"heavy": 4, "light": 4}
    assert admit(Newcomer("light", 1, 0), queue, 8) is None
    assert admit(Newcomer("heavy", 1, 0), queue, 8) is None


def test_the_owner_that_holds_most_loses_one_of_its_lowest_class() -> None:
    low = Request("most", priority=1, arrival=0.0)
    queue = [*line("most", 4), low, *line("many", 4, priority=2)]
    assert displaced_by(Newcomer("light", 1, 0), queue, 1) == [low]


def test_a_higher_class_takes_no_places_of_an_owner_that_holds_fewer() -> None:
    queue = [*line("heavy", 6, priority=-5), *line("light", 2, priority=1)]
    assert displaced_by(Newcomer("heavy", 1, -5), queue, 1) is None
    assert displaced_by(Newcomer("heavy", 1, -6), queue, 1) == [queue[5]], "of its own lower ones"


def test_what_holds_too_many_places_at_once_stays_and_a_smaller_one_leaves() -> None:
    queue = [*line("heavy", 3), Request("heavy", num_images=8, arrival=10.0)]
    newcomer = Newcomer("light", 4, 0)
    assert displaced_by(newcomer, queue, 1) == [queue[2]]


def test_where_not_enough_can_leave_nothing_does() -> None:
    begun = [Request("heavy", arrival=arrival, can_be_displaced=False) for arrival in range(6)]
    queue = [*begun, *line("heavy", 2)]
    assert displaced_by(Newcomer("light", 3, 0), queue, 3) is None
    leaving = displaced_by(Newcomer("light", 2, 0), queue, 2)
    assert leaving is not None
    assert len(leaving) == 2

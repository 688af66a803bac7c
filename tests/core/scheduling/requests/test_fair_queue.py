"""Fair queueing: owners get equal shares, none starves, and with one owner the order is by urgency only."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest
from fakes import MODEL, make_edit
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import CLASS_SECONDS
from core.costs.load_report import LoadReport, RequestLoad
from core.graph.catalog import WORKFLOWS
from core.routing.engine_queue import EngineQueue
from core.scheduling.requests.bindings import Bindings
from core.scheduling.requests.fair_queue import Claim, FairQueue, counts_as_due
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request

OWNERS = st.sampled_from(["a", "b", "c", "d"])
SECONDS = st.floats(0.001, 20.0)


def claim(name: str, owner: str, seconds: float = 1.0, *, priority: int = 0, arrival: float = 0.0) -> Claim[str]:
    return Claim(name, owner, priority, (counts_as_due(arrival, None, priority), arrival, name), seconds)


@dataclass
class Server:
    """One slot; work is done in the queue's order. got: owner -> seconds of work begun."""

    queue: FairQueue[str] = field(default_factory=FairQueue)
    claims: dict[str, Claim[str]] = field(default_factory=dict)
    got: dict[str, float] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)

    def add(self, owner: str, seconds: float, priority: int = 0) -> str:
        number = next(self.numbers)
        new = claim(f"{owner}-{number:04}", owner, seconds, priority=priority, arrival=number * 1e-6)
        self.claims[new.item] = new
        self.queue.add(new)
        return new.item

    def serve(self) -> str:
        name = next(self.queue.in_order())
        done = self.claims.pop(name)
        self.queue.begin(done)
        self.queue.remove(done)
        self.got[done.owner] = self.got.get(done.owner, 0.0) + done.seconds
        return name

    def wants(self, owner: str) -> bool:
        return any(other.owner == owner for other in self.claims.values())


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(-3, 3), st.none() | st.floats(0, 1e6), SECONDS), max_size=30))
def test_one_owner_has_the_order_of_urgency(requests: list[tuple[float, int, float | None, float]]) -> None:
    queue: FairQueue[str] = FairQueue()
    claims = [
        Claim(str(index), "a", priority, (counts_as_due(arrival, due, priority), arrival, str(index)), seconds)
        for index, (arrival, priority, due, seconds) in enumerate(requests)
    ]
    for one in claims:
        queue.add(one)
        if len(queue) % 3 == 0:
            queue.begin(one)
    assert list(queue.in_order()) == [one.item for one in sorted(claims, key=lambda one: one.urgency)]


@given(st.lists(st.tuples(OWNERS, SECONDS), min_size=1, max_size=30))
def test_busy_owners_get_equal_shares_to_within_one_piece_of_work(work: list[tuple[str, float]]) -> None:
    """Start-time fair queueing's own bound: what two owners get while both wait differs by one piece of each."""
    server = Server()
    for owner, seconds in work:
        server.add(owner, seconds)
    longest = {owner: max(seconds for other, seconds in work if other == owner) for owner, _ in work}
    while all(map(server.wants, longest)):
        server.serve()
        for one in longest:
            for other in longest:
                difference = server.got.get(one, 0.0) - server.got.get(other, 0.0)
                assert difference <= longest[one] + longest[other] + 1e-6


@given(st.integers(1, 40), SECONDS, st.lists(SECONDS, max_size=10), st.integers(0, 39))
def test_a_newcomer_waits_for_one_piece_of_work_at_most(
    num_waiting: int, seconds: float, before: list[float], num_served: int
) -> None:
    """Regardless of another owner's demand and earlier work, and of the new owner's earlier work."""
    server = Server()
    for own in before:
        server.add("b", own)
        server.serve()
    for _ in range(num_waiting):
        server.add("a", seconds)
    for _ in range(min(num_served, num_waiting - 1)):
        server.serve()
    newcomer = server.add("b", 1.0)
    assert newcomer in [server.serve(), server.serve() if server.claims else newcomer]


@given(st.lists(st.tuples(OWNERS, SECONDS, st.integers(-1, 1)), min_size=1, max_size=20), st.floats(5.0, 20.0))
@settings(deadline=None)
def test_no_owner_starves(work: list[tuple[str, float, int]], seconds: float) -> None:
    """For any number of classes: an endless flood of higher ones gets only a bounded amount of work first."""
    server = Server()
    waiting = {server.add(owner, cost, priority) for owner, cost, priority in work}
    limit = sum(cost for _, cost, _ in work) + 3 * CLASS_SECONDS + 2 * seconds
    server.add("flood", seconds, -2)
    while waiting:
        name = server.serve()
        waiting.discard(name)
        if name.startswith("flood"):
            server.add("flood", seconds, -2)
            assert server.got["flood"] <= limit, f"{waiting} starve"


@given(st.lists(st.tuples(OWNERS, SECONDS, st.integers(-1, 1)), min_size=6, max_size=30), st.integers(0, 5))
def test_everything_is_served_once_in_the_order_that_was_shown(
    work: list[tuple[str, float, int]], num_served: int
) -> None:
    server = Server()
    names = {server.add(*one) for one in work}
    names -= {server.serve() for _ in range(num_served)}
    foretold = list(server.queue.in_order())
    assert set(foretold) == names == set(server.claims)
    assert [server.serve() for _ in foretold] == foretold, "as if nothing came meanwhile"
    assert not len(server.queue)


def test_a_higher_class_of_another_owner_goes_first_by_a_limited_amount_of_work() -> None:
    server = Server()
    server.add("a", 1.0, priority=1)
    for _ in range(200):
        server.add("b", 1.0)
    served = [server.serve() for _ in range(201)]
    position = next(index for index, name in enumerate(served) if name.startswith("a"))
    assert position == pytest.approx(CLASS_SECONDS, abs=2)


def test_among_owners_with_equal_shares_the_most_urgent_goes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add(Claim("late", "a", 0, (counts_as_due(0.0, None, 0), 0.0, "late"), 1.0))
    queue.add(Claim("due", "b", 0, (counts_as_due(5.0, 7.0, 0), 5.0, "due"), 1.0))
    assert list(queue.in_order()) == ["due", "late"]


def test_an_owner_is_charged_what_its_work_really_took() -> None:
    queue: FairQueue[str] = FairQueue()
    first = claim("a-0", "a", seconds=0.01)
    for one in (
        first,
        claim("a-1", "a", 0.01, arrival=1.0),
        claim("b-0", "b", arrival=2.0),
        claim("b-1", "b", arrival=3.0),
    ):
        queue.add(one)
    queue.begin(first)
    assert list(queue.in_order()) == ["a-0", "b-0", "a-1", "b-1"]
    queue.remove(first, took=5.0)
    assert list(queue.in_order()) == ["b-0", "b-1", "a-1"], "it was said to take 10 ms"


def test_work_that_is_given_back_is_not_charged() -> None:
    queue: FairQueue[str] = FairQueue()
    first, other = claim("a-0", "a", arrival=0.0), claim("b-0", "b", arrival=1.0)
    queue.add(first)
    queue.add(other)
    queue.begin(first)
    queue.give_back(first)
    assert list(queue.in_order()) == ["a-0", "b-0"]


def test_items_that_are_not_queued_cannot_be_removed() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add(claim("a-0", "a"))
    with pytest.raises(ValueError, match="not in the queue"):
        queue.remove(claim("a-0", "a"))


def test_who_begins_again_pays_for_what_was_done_and_what_is_left_once() -> None:
    """Its work was sent back at 4 of 10 s left; another owner's takes 12 s."""
    requests, bindings = LiveRequests(), Bindings({MODEL.name: MODEL})

    def add(name: str, seconds: float) -> None:
        request = Request.of(make_edit(name, owner=name[0]), WORKFLOWS, bindings)
        requests.add(request, RequestLoad(0, 0.0, seconds, owner=name[0]))

    for name, seconds in (("a1", 10.0), ("b1", 12.0), ("a2", 1.0), ("b2", 1.0)):
        add(name, seconds)
    for name in ("a1", "b1"):
        requests.begin(name, lambda request: 0.0)
    requests.send_back("a1", RequestLoad(0, 0.0, 4.0, owner="a"))
    requests.begin("a1", lambda request: 0.0)
    assert [each.id for each in requests.in_order()][-2:] == ["a2", "b2"], "a has had 10 s, b 12 s"
    running = {each.id: RequestLoad(0, 0.0, 1.0, owner=each.id[0]) for each in requests.running}
    report = LoadReport(
        num_received=4, num_running=2, num_waiting=2, running=running, is_first=True, queue=requests.take_changes()
    )
    router = EngineQueue()
    router.update(report)
    assert [load.owner for load in router.loads()][-2:] == ["a", "b"], "the router's copy is charged alike"

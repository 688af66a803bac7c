"""InFlight: batches on one or more ranks, answered in any order; queues of ranks never wait in a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, make_edit
from hypothesis import given
from hypothesis import strategies as st

from core.config import SchedulerConfig
from core.costs.cost_model import CostKey
from core.failure import Failure
from core.graph.work import Work
from core.messages.engine import Finished
from core.messages.worker import Batch, BatchResult, ItemResult
from core.scheduling.dispatch import Decision, Dispatch, Fetch
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.ranks.in_flight import Flight, InFlight
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.scheduler import StepScheduler
from core.scheduling.view import View

RANKS = 4

KEYS = ModelKeys("flux", "cpu", ())


def flight(number: int, *ranks: int) -> Flight:
    return Flight(Batch(number, "denoise", ranks, ()), KEYS, Work((1,), (1,)), predicted=2.0)


def answer(number: int, rank: int, *, seconds: float = 1.0, failed: tuple[str, ...] = ()) -> BatchResult:
    failure = Failure("engine", f"on rank {rank}")
    items = tuple(ItemResult(name, "denoise", failure=failure if name in failed else None) for name in ("a", "b"))
    return BatchResult(batch_id=number, rank=rank, started=float(rank), seconds=seconds, items=items)


def test_a_batch_is_complete_when_all_its_ranks_have_answered() -> None:
    in_flight = InFlight(RANKS)
    in_flight.send(0, flight(7, 0, 2), 0.0)
    in_flight.send(0, flight(8, 1), 0.0)
    assert list(in_flight.busy_ranks(range(RANKS))) == [0, 1, 2]
    landed = in_flight.land(answer(7, 2, seconds=3.0, failed=("b",)))
    assert (landed.is_complete, landed.waits_for) == (False, [0])
    assert in_flight.busy_ranks(range(RANKS)) == {0: (2.0, 0.0), 1: (2.0, 0.0)}
    in_flight.check_integrity(0)
    landed = in_flight.land(answer(7, 0, seconds=2.0))
    result = landed.result()
    assert landed.is_complete
    assert (result.started, result.seconds, landed.busy_seconds) == (0.0, 3.0, 5.0)
    assert [(item.request_id, item.failure and item.failure.message) for item in result.items] == [
        ("a", None),
        ("b", "on rank 2"),
    ]
    assert list(in_flight.busy_ranks(range(RANKS))) == [1]
    in_flight.check_integrity(0)


def test_ranks_with_little_work_are_nearly_idle() -> None:
    in_flight = InFlight(RANKS, max_plans=2, max_seconds=3.0)
    in_flight.send(0, flight(7, 0, 1), 0.0)
    in_flight.send(0, flight(8, 1), 0.0)
    assert (in_flight.idle_ranks, in_flight.nearly_idle_ranks, in_flight.has_busy) == ({2, 3}, {0}, True)
    in_flight.land(answer(8, 1))
    assert in_flight.nearly_idle_ranks == {0, 1}
    in_flight.send(1, flight(9, 0), 0.0)
    assert in_flight.nearly_idle_ranks == {1}, "two plans are enough"
    in_flight.clear()
    assert (in_flight.idle_ranks, in_flight.nearly_idle_ranks, in_flight.has_busy) == (set(range(RANKS)), set(), False)


def test_a_rank_is_awaited_as_long_as_what_it_has_is_predicted_to_take() -> None:
    in_flight = InFlight(RANKS)
    in_flight.send(0, flight(7, 0), 10.0)
    in_flight.send(1, flight(8, 0), 11.0)
    unknown = flight(9, 1)
    unknown.predicted = 0.0
    in_flight.send(1, unknown, 11.0)
    assert [in_flight.wait_seconds(rank, 11.5) for rank in range(3)] == [2.5, 0.0, 0.0], "of rank 1 nothing is known"
    assert [in_flight.seconds_left(rank, 11.5) for rank in range(2)] == [2.5, None]
    in_flight.land(msgspec.structs.replace(answer(7, 0), started=10.0, seconds=3.0))
    assert in_flight.wait_seconds(0, 13.5) == 1.5
    assert in_flight.wait_seconds(0, 20.0) == 0.0, "it takes longer than predicted"
    assert in_flight.seconds_left(0, 20.0) == -5.0
    in_flight.lose(0)
    assert in_flight.wait_seconds(0, 13.5) == 0.0


def test_an_answer_that_was_not_awaited_is_an_error() -> None:
    in_flight = InFlight(RANKS)
    in_flight.send(0, flight(7, 0, 2), 0.0)
    with pytest.raises(KeyError):
        in_flight.land(answer(7, 1))
    with pytest.raises(KeyError):
        in_flight.land(answer(6, 0))
    in_flight.land(answer(7, 2))
    with pytest.raises(KeyError):
        in_flight.land(answer(7, 2))


@given(st.data())
def test_any_order_of_answers_ends_every_batch_once(data: st.DataObject) -> None:
    in_flight, waiting = InFlight(RANKS, max_plans=2, max_seconds=5.0), list[tuple[int, int]]()
    number = 0
    for seq in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 3))):
            ranks = tuple(data.draw(st.lists(st.integers(0, RANKS - 1), min_size=1, unique=True)))
            in_flight.send(seq, flight(number, *ranks), 0.0)
            waiting += [(number, rank) for rank in ranks]
            number += 1
    completed = []
    while waiting:
        batch, rank = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        if in_flight.land(answer(batch, rank)).is_complete:
            completed.append(batch)
        in_flight.check_integrity(0)
        assert list(in_flight.busy_ranks(range(RANKS))) == sorted({rank for _, rank in waiting})
    assert sorted(completed) == list(range(number))
    assert not in_flight.flights


@given(st.lists(st.lists(st.integers(0, RANKS - 1), min_size=1, unique=True), max_size=12), st.data())
def test_queues_that_keep_the_total_order_never_wait_in_a_circle(batches: list[list[int]], data: st.DataObject) -> None:
    """Each rank begins the batches of its queue in their order; a batch runs once all its ranks have begun it."""
    queues = [deque(number for number, ranks in enumerate(batches) if rank in ranks) for rank in range(RANKS)]
    done = []
    while any(queues):
        ready = {queue[0] for queue in queues if queue}
        runnable = [number for number in ready if all(queues[rank][0] == number for rank in batches[number])]
        assert runnable, "the ranks wait for each other"
        number = data.draw(st.sampled_from(runnable))
        for rank in batches[number]:
            queues[rank].popleft()
        done.append(number)
    assert sorted(done) == list(range(len(batches)))


class StepsOnBoth(SchedulingPolicy):
    """Runs steps on both ranks, all else on the first."""

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        decisions: list[Decision] = []
        for request in view.requests.live():
            for node in view.ready(request):
                ranks = (0, 1) if node.name == "denoise" else (0,)
                if view.can_run(request, node, ranks):
                    decisions.append(Dispatch(((request, node),), ranks))
                elif view.can_fetch(request, node, ranks):
                    decisions.append(Fetch(request, node, ranks))
        return decisions


def test_a_step_on_two_ranks_counts_once_and_costs_as_degree_two() -> None:
    scheduler, workers = StepScheduler(SchedulerConfig(), {"m": MODEL}, 2), FakeWorkers(2)
    scheduler._policy = StepsOnBoth()
    scheduler.add(make_edit("a", steps=2))
    outputs = []
    while scheduler.num_requests:
        plan = scheduler.schedule(0.0)
        if plan is not None:
            workers.submit(plan)
        for rank in (1, 0):
            for result in workers.run_one(rank):
                if not isinstance(result, BatchResult):
                    scheduler.apply_transfer(result)
                    continue
                slow = 0.5 if result.items[0].node == "denoise" and rank == 1 else 0.01
                scheduler.apply(msgspec.structs.replace(result, seconds=slow))
                scheduler.check_integrity()
        outputs += scheduler.take_outputs()
    assert [type(output) for output in outputs] == [Finished]
    stats = scheduler.stats()
    assert stats.steps == 2
    assert stats.busy_seconds["denoise"] == pytest.approx(2 * (0.5 + 0.01))
    assert CostKey(MODEL.family, (), "denoise", "cpu", 2) in scheduler.cost.lines()
    scheduler.check_integrity()

"""Requests in slots: when they are done, and the largest sets that are in time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.costs.forecast import Forecast, Pace, SlotTask
from core.costs.lane_filling import best_lanes, fill_lanes

PACE = Pace((1.0, 1.1, 1.3, 1.8), (0.0, 0.1, 0.1, 0.1))
SECONDS = st.floats(0.0, 3.0)
TASKS = st.lists(
    st.tuples(st.integers(1, 8), st.floats(0.1, 2.0), SECONDS, SECONDS, st.floats(0.5, 40.0)), max_size=7
).map(lambda drawn: sorted((SlotTask(*values) for values in drawn), key=lambda task: task.due_in))


LINEAR = Pace((0.0,) * 8, (1.0,) * 8)


def are_in_time(tasks: Sequence[SlotTask], slots: Forecast) -> bool:
    return all(end <= task.due_in for task, end in zip(tasks, slots.ends(tasks), strict=True))


def largest_sets(tasks: Sequence[SlotTask], ranks: Sequence[Forecast]) -> list[list[int]]:
    return [lane.chosen for lane in fill_lanes(tasks, ranks)]


def largest_set(tasks: list[SlotTask], number: int, pace: Pace = LINEAR) -> list[int]:
    """Of one rank."""
    (chosen,) = largest_sets(tasks, [Forecast(number, pace)])
    return chosen


def step_by_step(tasks: list[SlotTask], num_slots: int, pace: Pace, *, blocks: bool) -> tuple[list[float], bool]:
    """(the ends, found by making every step; whether several requests end with one step)."""
    now, waiting, running, done = 0.0, list(range(len(tasks))), dict[int, int](), [0.0] * len(tasks)
    has_ties = False
    while waiting or running:
        while waiting and len(running) < num_slots:
            index = waiting.pop(0)
            running[index] = tasks[index].steps
            now += tasks[index].before if blocks else 0.0
        now += pace.seconds(len(running), sum(tasks[index].size for index in running))
        running = {index: steps - 1 for index, steps in running.items()}
        ended = sorted(index for index, steps in running.items() if not steps)
        has_ties |= len(ended) > 1
        for index in ended:
            done[index] = now + tasks[index].after + (0.0 if blocks else tasks[index].before)
            now += tasks[index].after if blocks else 0.0
            del running[index]
    return done, has_ties


@given(TASKS, st.integers(1, 4), st.booleans())
def test_ends_are_those_of_a_run_made_step_by_step(tasks: list[SlotTask], num_slots: int, blocks: bool) -> None:
    """Ends of one step may take the slots of each other at the same time: their order does not matter."""
    found = Forecast(num_slots, PACE, blocks=blocks).ends(tasks)
    steps, has_ties = step_by_step(tasks, num_slots, PACE, blocks=blocks)
    if not blocks or not has_ties:
        assert found == pytest.approx(steps)
    assert max(found, default=0.0) == pytest.approx(max(steps, default=0.0), rel=0.5)


@given(TASKS.filter(bool), st.integers(1, 3), st.booleans(), SECONDS)
def test_the_end_of_the_last_one_of_all_that_are_in_time(
    tasks: list[SlotTask], num_slots: int, blocks: bool, start: float
) -> None:
    slots = Forecast(num_slots, PACE, blocks, start)
    assert slots.end_of_last(tasks) == (slots.ends(tasks)[-1] if are_in_time(tasks, slots) else inf)


def test_more_requests_than_measured_cost_in_proportion() -> None:
    assert PACE.seconds(8, 8.0) == pytest.approx(2 * PACE.seconds(4, 4.0))


@given(TASKS, st.integers(1, 4), st.booleans())
def test_a_rank_that_is_busy_ends_everything_later(tasks: list[SlotTask], num_slots: int, blocks: bool) -> None:
    at_once, later = (Forecast(num_slots, PACE, blocks, start).ends(tasks) for start in (0.0, 2.5))
    assert later == pytest.approx([end + 2.5 for end in at_once])


@given(TASKS, st.integers(1, 4), st.booleans(), st.lists(st.floats(0.0, 5.0), min_size=1, max_size=3))
def test_those_that_are_chosen_are_in_time(
    tasks: list[SlotTask], num_slots: int, blocks: bool, starts: list[float]
) -> None:
    ranks = [Forecast(num_slots, PACE, blocks, start) for start in starts]
    sets = largest_sets(tasks, ranks)
    chosen = [index for of_rank in sets for index in of_rank]
    assert len(chosen) == len(set(chosen)), "each is served by one rank"
    assert all(of_rank == sorted(of_rank) for of_rank in sets)
    for slots, of_rank in zip(ranks, sets, strict=True):
        assert are_in_time([tasks[index] for index in of_rank], slots)
    lanes = best_lanes(tasks, num_slots, PACE, starts, blocks=blocks)
    for start, lane in zip(starts, lanes, strict=True):
        members = [tasks[index] for index in lane.chosen]
        assert are_in_time(members, Forecast(lane.slots.number, PACE, blocks, start))
        assert len(tasks) == 0 or 1 <= lane.slots.number <= num_slots
    assert sum(len(each.chosen) for each in lanes) >= len(chosen), "it tries this number of slots, too"


@given(TASKS, st.integers(1, 3), st.data())
def test_requests_are_served_only_by_ranks_that_can(tasks: list[SlotTask], num_ranks: int, data: st.DataObject) -> None:
    able = st.lists(st.integers(0, num_ranks - 1), unique=True).map(lambda drawn: tuple(sorted(drawn)))
    tasks = [task._replace(ranks=data.draw(able)) for task in tasks]
    for rank, of_rank in enumerate(largest_sets(tasks, [Forecast(2, PACE)] * num_ranks)):
        assert all(rank in tasks[index].ranks or not tasks[index].ranks for index in of_rank)


@given(TASKS)
def test_a_second_rank_never_serves_less(tasks: list[SlotTask]) -> None:
    one, two = (largest_sets(tasks, [Forecast(1, PACE)] * number) for number in (1, 2))
    assert sum(map(len, two)) >= len(one[0])


def test_a_request_goes_where_it_is_done_first_and_another_one_goes_only_if_it_fits_nowhere() -> None:
    ranks = [Forecast(1, LINEAR, start=2.0), Forecast(1, LINEAR)]
    first, second, third = SlotTask(4, 1.0, due_in=6.0), SlotTask(4, 1.0, due_in=6.5), SlotTask(3, 1.0, due_in=7.0)
    assert largest_sets([first], ranks) == [[], [0]]
    assert largest_sets([first, second], ranks) == [[1], [0]]
    assert largest_sets([first, second, third], ranks) == [[1], [0, 2]]
    assert largest_sets([first, second, third._replace(due_in=6.9)], ranks) == [[2], [0]], "the longest goes, due last"


@given(TASKS)
def test_one_slot_serves_as_many_as_any_choice_could(tasks: list[SlotTask]) -> None:
    """Moore and Hodgson's theorem, for requests without work besides their steps."""
    plain = [task._replace(before=0.0, after=0.0) for task in tasks]
    chosen = largest_set(plain, 1)
    sizes = (
        size
        for size in range(len(plain), -1, -1)
        if any(are_in_time(some, Forecast(1, LINEAR)) for some in combinations(plain, size))
    )
    assert len(chosen) == next(sizes)


def test_a_newcomer_joins_only_if_all_stay_in_time_or_if_it_takes_less() -> None:
    committed, newcomer = SlotTask(4, 1.0, due_in=6.0), SlotTask(4, 1.0, due_in=7.0)
    assert largest_set([committed, newcomer], 2) == [0]
    assert largest_set([committed, newcomer._replace(steps=1)], 2) == [0, 1]
    long = committed._replace(steps=6)
    assert largest_set([long, newcomer], 2) == [1], "the one with most work left goes"


def test_requests_give_way_only_to_their_own_group_and_musts_to_none() -> None:
    long, short = SlotTask(6, 1.0, due_in=6.0), SlotTask(4, 1.0, due_in=7.0)
    assert largest_set([long, short._replace(group=("other", 0))], 2) == [0]
    assert largest_set([long._replace(must=True), short], 2) == [0]
    must = SlotTask(9, 1.0, due_in=inf, must=True)
    assert 1 in largest_set([SlotTask(2, 1.0, due_in=2.0), must], 2)


def test_requests_without_a_due_time_wait_while_others_would_be_late() -> None:
    assert largest_set([SlotTask(4, 1.0, due_in=5.0), SlotTask(9, 1.0)], 2) == [0]
    assert largest_set([SlotTask(4, 1.0, due_in=50.0), SlotTask(9, 1.0)], 2) == [0, 1]


def test_few_slots_are_chosen_where_batches_gain_nothing() -> None:
    """Four together would all be done after 16 s; one by one the first three are in time."""
    tasks = [SlotTask(4, 1.0, due_in=4.0 * number) for number in (1, 2, 3)]
    assert largest_set(tasks, 4) != [0, 1, 2]
    (lane,) = best_lanes(tasks, 4, LINEAR, [0.0])
    assert (lane.chosen, lane.slots.number) == ([0, 1, 2], 1)


def test_as_many_slots_are_tried_as_no_batch_has_shown_the_time_of_unless_one_would_be_late() -> None:
    tasks = [SlotTask(4, 1.0)] * 4

    def num_slots(tasks: list[SlotTask], seen: int) -> int:
        (lane,) = best_lanes(tasks, 4, LINEAR, [0.0], largest_seen=seen)
        assert len(lane.chosen) == len(tasks)
        return lane.slots.number

    assert [num_slots(tasks, seen) for seen in (0, 1, 3, 4)] == [4, 4, 4, 1]
    assert num_slots([tasks[0]._replace(due_in=5.0), *tasks[1:]], 0) == 1


def test_requests_share_steps_for_those_to_come_where_they_have_no_due_time() -> None:
    """Together both are done after 6.4 s, one by one after 4 and 8 s."""
    pace = Pace((1.0, 1.6), (0.0, 0.0))
    open_end, due = SlotTask(4, 1.0), SlotTask(4, 1.0, due_in=20.0, has_due=True)
    late = due._replace(due_in=inf)
    lanes = [best_lanes([task] * 2, 2, pace, [0.0], largest_seen=2)[0] for task in (open_end, due, late)]
    assert [lane.slots.number for lane in lanes] == [2, 1, 1]


def test_the_images_of_a_call_share_steps_because_all_of_them_are_waited_for() -> None:
    """One by one the first is done sooner, and all later by a little."""
    pace = Pace((0.1,) * 3, (1.0,) * 3)
    of_calls = [SlotTask(4, 1.0, call="a")] * 3, [SlotTask(4, 1.0, call=name) for name in "abc"]
    together, apart = (best_lanes(tasks, 3, pace, [0.0], largest_seen=3)[0].slots.number for tasks in of_calls)
    assert (together, apart) == (3, 1)

"""Requests in slots: when they are done, and the largest set that is in time."""

from __future__ import annotations

from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.costs.slot_schedule import Pace, Turn, are_in_time, best_schedule, ends, largest_set, linear_pace

PACE = Pace((1.0, 1.1, 1.3, 1.8), (0.0, 0.1, 0.1, 0.1))
SECONDS = st.floats(0.0, 3.0)
TURNS = st.lists(
    st.tuples(st.integers(1, 8), st.floats(0.1, 2.0), SECONDS, SECONDS, st.floats(0.5, 40.0)), max_size=7
).map(lambda drawn: sorted((Turn(*values) for values in drawn), key=lambda turn: turn.left))


def step_by_step(turns: list[Turn], num_slots: int, pace: Pace, *, blocks: bool) -> tuple[list[float], bool]:
    """(the ends, found by making every step; whether several requests end with one step)."""
    now, waiting, running, done = 0.0, list(range(len(turns))), dict[int, int](), [0.0] * len(turns)
    has_ties = False
    while waiting or running:
        while waiting and len(running) < num_slots:
            index = waiting.pop(0)
            running[index] = turns[index].steps
            now += turns[index].before if blocks else 0.0
        now += pace.seconds(len(running), sum(turns[index].size for index in running))
        running = {index: steps - 1 for index, steps in running.items()}
        ended = sorted(index for index, steps in running.items() if not steps)
        has_ties |= len(ended) > 1
        for index in ended:
            done[index] = now + turns[index].after + (0.0 if blocks else turns[index].before)
            now += turns[index].after if blocks else 0.0
            del running[index]
    return done, has_ties


@given(TURNS, st.integers(1, 4), st.booleans())
def test_ends_are_those_of_a_run_made_step_by_step(turns: list[Turn], num_slots: int, blocks: bool) -> None:
    """Ends of one step may take the slots of each other at the same time: their order does not matter."""
    found = ends(turns, num_slots, PACE, blocks=blocks)
    steps, has_ties = step_by_step(turns, num_slots, PACE, blocks=blocks)
    if not blocks or not has_ties:
        assert found == pytest.approx(steps)
    assert max(found, default=0.0) == pytest.approx(max(steps, default=0.0), rel=0.5)


def test_more_requests_than_measured_cost_in_proportion() -> None:
    assert PACE.seconds(8, 8.0) == pytest.approx(2 * PACE.seconds(4, 4.0))
    assert linear_pace(1.0).seconds(3, 2.5) == 3.5


@given(TURNS, st.integers(1, 4), st.booleans())
def test_those_that_are_chosen_are_in_time(turns: list[Turn], num_slots: int, blocks: bool) -> None:
    chosen = largest_set(turns, num_slots, PACE, blocks=blocks)
    assert chosen == sorted(set(chosen))
    assert are_in_time([turns[index] for index in chosen], num_slots, PACE, blocks=blocks)
    schedule = best_schedule(turns, num_slots, PACE, blocks=blocks)
    members = [turns[index] for index in schedule.chosen]
    assert are_in_time(members, schedule.num_slots, PACE, blocks=blocks)
    assert len(members) >= len(chosen), "it tries this number of slots, too"
    assert len(turns) == 0 or 1 <= schedule.num_slots <= num_slots


@given(TURNS)
def test_one_slot_serves_as_many_as_any_choice_could(turns: list[Turn]) -> None:
    """Moore and Hodgson's theorem, for requests without work besides their steps."""
    plain = [turn._replace(before=0.0, after=0.0) for turn in turns]
    pace = linear_pace(0.0)
    chosen = largest_set(plain, 1, pace, blocks=True)
    sizes = (
        size
        for size in range(len(plain), -1, -1)
        if any(are_in_time(some, 1, pace, blocks=True) for some in combinations(plain, size))
    )
    assert len(chosen) == next(sizes)


def test_a_newcomer_joins_only_if_all_stay_in_time_or_if_it_takes_less() -> None:
    committed, newcomer = Turn(4, 1.0, left=6.0), Turn(4, 1.0, left=7.0)
    pace = linear_pace(0.0)
    assert largest_set([committed, newcomer], 2, pace, blocks=True) == [0]
    assert largest_set([committed, newcomer._replace(steps=1)], 2, pace, blocks=True) == [0, 1]
    long = committed._replace(steps=6)
    assert largest_set([long, newcomer], 2, pace, blocks=True) == [1], "the one with most work left goes"


def test_requests_give_way_only_to_their_own_group_and_musts_to_none() -> None:
    pace = linear_pace(0.0)
    long, short = Turn(6, 1.0, left=6.0), Turn(4, 1.0, left=7.0)
    assert largest_set([long, short._replace(group=("other", 0))], 2, pace, blocks=True) == [0]
    assert largest_set([long._replace(must=True), short], 2, pace, blocks=True) == [0]
    must = Turn(9, 1.0, left=inf, must=True)
    assert 1 in largest_set([Turn(2, 1.0, left=2.0), must], 2, pace, blocks=True)


def test_requests_without_a_due_time_wait_while_others_would_be_late() -> None:
    pace = linear_pace(0.0)
    assert largest_set([Turn(4, 1.0, left=5.0), Turn(9, 1.0)], 2, pace, blocks=True) == [0]
    assert largest_set([Turn(4, 1.0, left=50.0), Turn(9, 1.0)], 2, pace, blocks=True) == [0, 1]


def test_few_slots_are_chosen_where_batches_gain_nothing() -> None:
    """Four together would all be done after 16 s; one by one the first three are in time."""
    turns = [Turn(4, 1.0, left=4.0 * number) for number in (1, 2, 3)]
    assert largest_set(turns, 4, linear_pace(0.0), blocks=True) != [0, 1, 2]
    schedule = best_schedule(turns, 4, linear_pace(0.0), blocks=True)
    assert (schedule.chosen, schedule.num_slots) == ((0, 1, 2), 1)

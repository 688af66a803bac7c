"""Plans of ranks: disjoint sets of buddies, for the most urgent requests first, that nobody else is computing on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.scheduling.policies.buddies import Buddies
from core.scheduling.policies.rank_plan import Want, degrees, moves, plan

SPEEDS = {1: 1.0, 2: 1.9, 4: 3.5, 8: 5.0}


def want(
    name: str,
    steps: int = 10,
    first: int = 1,
    held: tuple[int, ...] = (),
    *,
    is_running: bool = False,
    is_ending: bool = False,
) -> Want:
    seconds = {degree: 1.0 / speed for degree, speed in SPEEDS.items()}
    return Want(name, steps, seconds, 1.0, first, held, is_running, is_ending)


def unknown(rank: int) -> None:
    """Nothing is predicted of what a rank has."""


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Want], list[int]]:
    """Requests of which some hold sets of ranks, and the ranks that may be used."""
    num_ranks = draw(st.integers(1, 16))
    buddies, wants = Buddies(range(num_ranks)), list[Want]()
    for index in range(draw(st.integers(0, 20))):
        held = buddies.take(draw(st.sampled_from([1, 2, 4]))) if draw(st.booleans()) else None
        is_running = held is not None and draw(st.booleans())
        steps, first = draw(st.integers(0, 30)), draw(st.sampled_from([1, 2, 4]))
        is_ending = is_running and not steps and draw(st.booleans())
        first = first if steps else 1
        wants.append(want(str(index), steps, first, held or (), is_running=is_running, is_ending=is_ending))
    usable = draw(st.sets(st.sampled_from(range(num_ranks)), min_size=1))
    return wants, sorted(usable)


@given(states())
def test_plans_are_disjoint_sets_of_buddies_for_the_first_requests(state: tuple[list[Want], list[int]]) -> None:
    wants, ranks = state
    places = plan(wants, ranks)
    used = [rank for place in places.values() for rank in place]
    assert len(used) == len(set(used))
    assert set(used) <= set(ranks)
    for place in places.values():
        assert place in list(Buddies(ranks).sets(len(place)))
    wants = [each for each in wants if not each.is_ending]
    assert set(places) == {each.name for each in wants[: len(places)]}, "nobody is passed over"
    assert len(places) == len(wants) or len(used) == len(ranks), "no rank is idle while a request waits for one"


@given(states(), st.sampled_from([None, 0.0, 0.2, 5.0]))
def test_moves_leave_alone_what_runs(state: tuple[list[Want], list[int]], wait: float | None) -> None:
    wants, ranks = state
    now = moves(wants, plan(wants, ranks), ranks, lambda rank: wait)
    running = {rank for each in wants if each.is_running for rank in each.held}
    used = [rank for place in now.values() for rank in place]
    assert len(used) == len(set(used))
    assert set(used) <= set(ranks) - running
    assert not {each.name for each in wants if each.is_running} & set(now)


def test_ranks_that_nobody_wants_go_to_those_that_save_most() -> None:
    assert degrees([want("long", 30), want("short", 3)], 3) == [2, 1]
    assert degrees([want("alone", 30)], 8) == [8]
    assert degrees([want(str(index)) for index in range(9)], 8) == [1] * 8
    assert degrees([want("a", first=2), want("b", first=2), want("c")], 4) == [2, 2]


def test_a_request_stays_where_its_state_is_and_shrinks_to_its_first_ranks() -> None:
    held = want("a", held=(4, 5, 6, 7))
    assert plan([held], range(8)) == {"a": tuple(range(8))}
    others = [want(str(index)) for index in range(7)]
    assert plan([held, *others], range(8))["a"] == (4,)
    assert plan([want("a", held=(2,)), want("b", held=(4, 5))], range(8))["b"] == (4, 5, 6, 7)


def test_a_request_waits_for_ranks_on_which_another_one_still_runs() -> None:
    grows, leaves = want("grows", first=2, held=(0,)), want("leaves", held=(1,), is_running=True)
    assert moves([grows, leaves], {"grows": (0, 1)}, range(2), unknown) == {"grows": (0,)}
    assert moves([grows], {"grows": (0, 1)}, range(2), unknown) == {"grows": (0, 1)}


@pytest.mark.parametrize(("wait", "ranks"), [(0.0, None), (0.46, None), (0.48, (0,)), (None, (0,))])
def test_a_step_waits_for_more_ranks_where_it_is_done_sooner(wait: float | None, ranks: tuple[int, ...] | None) -> None:
    """A step takes 1 s on one rank, and 0.53 on two."""
    grows, leaves = want("grows", first=2, held=(0,)), want("leaves", steps=0, held=(1,), is_running=True)
    now = moves([grows, leaves], {"grows": (0, 1)}, range(2), {0: 0.0, 1: wait}.get)
    assert now == ({} if ranks is None else {"grows": ranks})


def test_ranks_of_what_is_ending_are_planned_for_others_which_use_them_last() -> None:
    ending = want("ending", steps=0, held=(0,), is_running=True, is_ending=True)
    assert plan([ending, want("grows", first=2, held=(1,))], range(2)) == {"grows": (0, 1)}
    assert plan([ending, want("a"), want("b")], range(2)) == {"a": (1,), "b": (0,)}


def test_a_request_that_is_due_asks_for_the_ranks_that_it_needs() -> None:
    """Ten steps of 1 s, and 1 s besides."""
    assert [want("a").degree_within(limit) for limit in (11.0, 10.0, 5.0, 3.0, 2.0)] == [1, 2, 4, 8, 1]
    assert want("a", steps=0).degree_within(0.5) == 1

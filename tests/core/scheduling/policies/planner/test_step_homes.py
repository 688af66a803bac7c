"""Homes: what is known of a rank follows where its requests are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from core.scheduling.policies.planner.step_homes import StepHomes
from core.scheduling.policies.step_speeds import StepCost
from core.scheduling.requests.bindings import ModelKeys

RANKS = range(3)
KEYS = [ModelKeys(name, "cpu", ()) for name in ("base", "refiner")]
COST = StepCost(1.0, 0.25)
Moves = list[tuple[int, int, int]]


def request(number: int) -> Any:
    return SimpleNamespace(id=str(number))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(-1, 2)), max_size=30))
def test_requests_count_where_they_are_at_home(moves: Moves) -> None:
    """moves: (request, components, rank); -1: the request ends."""
    homes = StepHomes()
    for number, which, rank in moves:
        if rank < 0:
            homes.forget(str(number))
        else:
            homes.set(request(number), KEYS[which], rank, COST)
    at_home = {
        rank: [(n, key) for n in range(6) for key in KEYS if homes.find(request(n), key) == rank] for rank in RANKS
    }
    assert homes.num_on(RANKS) == {rank: len({n for n, _ in each}) for rank, each in at_home.items()}
    for rank, each in at_home.items():
        batches = {KEYS[0], *(key for _, key in each)}
        assert homes.round_seconds(rank, KEYS[0], COST) == len(batches) * COST.base + (len(each) + 1) * COST.extra


def test_a_newcomer_goes_where_a_round_takes_least() -> None:
    homes = StepHomes()
    homes.set(request(0), KEYS[0], 0, COST)
    homes.set(request(1), KEYS[1], 1, COST)
    assert homes.place(request(2), KEYS[0], RANKS, COST) == 2
    assert homes.place(request(3), KEYS[0], (0, 1), COST) == 0, "it shares that one's steps"
    assert homes.place(request(1), KEYS[0], RANKS, COST) == 1, "where its other steps are"

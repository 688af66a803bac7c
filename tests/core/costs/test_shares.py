"""Shares of ranks, and their placement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.costs.shares import UNITS, Demand, allot, colocated, place, ranks_of


def demand(seconds: float, objective: float, times: float = 1.0, most: int = 8) -> Demand:
    """A batch takes half as long again for each further request."""
    return Demand(lambda number: seconds * (0.5 + 0.5 * number), most, objective, times)


DEMANDS = st.dictionaries(
    st.sampled_from("abcde"),
    st.builds(demand, st.floats(0.01, 1.0), st.floats(0.05, 4.0), st.floats(1.0, 50.0)),
    min_size=1,
)


def test_normalised_goodput_is_the_batch_limit_over_the_partial_slo_and_the_runs() -> None:
    step = demand(0.01, 0.03, times=50)
    assert step.goodput(UNITS) == pytest.approx(5 / (0.03 * 50)), "five take 0.03 s"
    assert step.goodput(UNITS // 2) == pytest.approx(2 / (0.03 * 50)), "two take 0.015 s of a whole rank"
    assert step.goodput(2 * UNITS) == pytest.approx(2 * step.goodput(UNITS)), "two ranks"
    assert step.goodput(0) == 0.0


@given(DEMANDS, st.integers(1, 4))
def test_all_units_are_allotted_and_placed_where_there_is_room(demands: dict[str, Demand], num_ranks: int) -> None:
    units = allot(demands, num_ranks)
    assert sum(units.values()) == num_ranks * UNITS
    placement = place(units, num_ranks)
    assert {name: sum(parts.values()) for name, parts in placement.items()} == units
    for rank in range(num_ranks):
        assert sum(parts.get(rank, 0) for parts in placement.values()) <= UNITS


@given(DEMANDS, st.integers(1, 3))
def test_no_unit_moved_between_two_kinds_helps_the_slowest(demands: dict[str, Demand], num_ranks: int) -> None:
    """Of kinds whose goodput never falls with more units."""
    units = allot(demands, num_ranks)
    slowest = min(demands[name].goodput(units[name]) for name in demands)
    if slowest == 0.0:
        return
    for giver in demands:
        if units[giver] > 1:
            fewer = {name: units[name] - (name == giver) for name in demands}
            given_up = demands[giver].goodput(fewer[giver])
            bottleneck = min(demands, key=lambda name: demands[name].goodput(units[name]))
            if giver != bottleneck:
                assert min(given_up, demands[bottleneck].goodput(units[bottleneck])) <= slowest


def test_the_loop_gets_most_and_is_split_over_ranks() -> None:
    demands = {"denoise": demand(0.01, 0.03, times=50), "decode": demand(0.05, 0.3), "encode": demand(0.02, 0.3)}
    units = allot(demands, 2)
    assert units["denoise"] > UNITS
    assert units["decode"] > units["encode"], "it takes longer"
    assert set(place(units, 2)["denoise"]) == {0, 1}


def test_too_few_units_are_refused() -> None:
    with pytest.raises(ValueError, match="too few units"):
        allot({str(number): demand(1, 1) for number in range(UNITS + 1)}, 1)


def test_a_fixed_split_is_given_up_where_the_slower_kind_gains() -> None:
    """Denoising takes far more than half of the time: it gets both ranks, and the others share them with it."""
    demands = {"denoise": demand(0.1, 0.3, times=20), "decode": demand(0.1, 0.3), "encode": demand(0.05, 0.15)}
    assert ranks_of(demands, 2) == dict.fromkeys(demands, (0, 1))


def test_kinds_that_are_equally_fast_keep_ranks_of_their_own() -> None:
    demands = {"one": demand(0.1, 0.3), "other": demand(0.1, 0.3)}
    assert sorted(colocated(demands, {"one": UNITS, "other": UNITS})) == [("one",), ("other",)]
    assert len(colocated(demands, {"one": UNITS + 2, "other": UNITS - 2})) == 1


@given(DEMANDS, st.integers(1, 4))
def test_every_kind_has_a_rank_once_and_no_rank_is_without_work(demands: dict[str, Demand], num_ranks: int) -> None:
    ranks = ranks_of(demands, num_ranks)
    assert set(ranks) == set(demands)
    assert all(of and len(set(of)) == len(of) for of in ranks.values())
    assert {rank for of in ranks.values() for rank in of} == set(range(num_ranks))


# ------------------------------------------------------------------------------------------------- the finish order

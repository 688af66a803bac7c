"""The buddy allocator: sets are disjoint, aligned and of ranks that live, and freed halves come together again."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.scheduling.policies.buddies import Buddies, power_of_two
from core.scheduling.policies.papers.ddit import take_around

RANKS = st.sets(st.integers(0, 20), min_size=1)


def all_sets(ranks: set[int]) -> list[tuple[int, ...]]:
    return [each for size in (1, 2, 4, 8, 16, 32) for each in Buddies(ranks).sets(size)]


@given(RANKS)
def test_any_two_sets_are_disjoint_or_one_contains_the_other(ranks: set[int]) -> None:
    sets = all_sets(ranks)
    assert len(sets) <= 2 * len(ranks) - 1
    for one, other in combinations(map(set, sets), 2):
        assert not one & other or one < other or other < one
    assert all(set(each) <= ranks for each in sets), "only ranks that live"


@given(RANKS, st.data())
def test_no_rank_is_taken_twice_and_what_is_given_back_comes_together(ranks: set[int], data: st.DataObject) -> None:
    buddies, taken = Buddies(ranks), list[tuple[int, ...]]()
    for _ in range(30):
        size = data.draw(st.sampled_from([1, 2, 4, 8]))
        num_free, has_set = buddies.num_free, any(True for _ in buddies.sets(size))
        match data.draw(st.sampled_from(["take", "at most", "around", "give"])):
            case "take":
                found = buddies.take(size)
                assert (found is not None) == has_set
            case "at most":
                found = buddies.take_at_most(size)
                assert (found is not None) == (num_free > 0)
                assert found is None or len(found) <= size
            case "around" if taken:
                found = take_around(buddies, taken[-1], max(size, len(taken[-1])))
                if found is not None:
                    assert {*taken.pop()} <= {*found}
            case _:
                found = None
                if taken:
                    buddies.give(taken.pop())
        if found is not None:
            assert len(found) in (1, 2, 4, 8)
            assert found[0] % len(found) == 0
            assert found == tuple(range(found[0], found[0] + len(found)))
            taken.append(found)
        held = [rank for each in taken for rank in each]
        assert len(held) == len(set(held)), "a rank is in two sets"
        assert set(held) <= ranks
        assert buddies.num_free == len(ranks) - len(held)
    for each in taken:
        buddies.give(each)
    assert [each for size in (1, 2, 4, 8, 16, 32) for each in buddies.sets(size)] == all_sets(ranks)


def test_small_sets_leave_large_ones_whole() -> None:
    buddies = Buddies(range(8))
    assert [buddies.take(size) for size in (1, 2, 1, 4)] == [(0,), (2, 3), (1,), (4, 5, 6, 7)]
    assert buddies.take(1) is None


def test_a_set_grows_by_its_buddy_alone() -> None:
    buddies = Buddies(range(8))
    assert [buddies.take(1) for _ in range(3)] == [(0,), (1,), (2,)]
    assert take_around(buddies, (0,), 2) is None
    assert take_around(buddies, (2,), 2) == (2, 3)
    assert buddies.take(4) == (4, 5, 6, 7)


def test_where_a_rank_is_dead_its_sets_are_missing() -> None:
    assert all_sets({1, 2, 3, 4, 5}) == [(1,), (2,), (3,), (4,), (5,), (2, 3), (4, 5)]
    assert Buddies([]).take_at_most(4) is None


def test_a_rank_that_is_not_held_cannot_be_freed_nor_one_that_is_not_free_be_held() -> None:
    buddies = Buddies(range(2))
    with pytest.raises(AssertionError, match="free already"):
        buddies.give((0,))
    buddies.hold((0,))
    with pytest.raises(AssertionError, match="not free"):
        buddies.hold((0, 1))
    with pytest.raises(AssertionError, match="no free set"):
        buddies.take_this(0, 2)


def test_powers_of_two() -> None:
    assert [power_of_two(number) for number in (1, 2, 3, 4, 7, 8, 100)] == [1, 2, 2, 4, 4, 8, 64]

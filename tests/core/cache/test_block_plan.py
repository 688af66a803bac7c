"""Block plans against exhaustive search and the paper's rule."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, groupby, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.block_plan import (
    BlockRun,
    Run,
    algorithm_1,
    finish_time,
    plan_blocks,
    plan_prefix,
    plan_subset,
    prefix_of,
)

Blocks = tuple[list[float], list[float], list[float]]

times = st.floats(0.0, 10.0, allow_subnormal=False)
whole_times = st.integers(0, 12).map(float)


@st.composite
def equal_blocks(draw: st.DrawFn, largest: int = 10) -> Blocks:
    number = draw(st.integers(0, largest))
    full, cached, load = (draw(st.one_of(times, whole_times)) for _ in range(3))
    return [full] * number, [cached] * number, [load] * number


@st.composite
def mixed_blocks(draw: st.DrawFn, largest: int = 8) -> Blocks:
    number = draw(st.integers(0, largest))
    kind = draw(st.sampled_from([times, whole_times]))
    full, cached, load = (draw(st.lists(kind, min_size=number, max_size=number)) for _ in range(3))
    return full, cached, load


def soonest(plans: Iterable[tuple[bool, ...]], blocks: Blocks) -> float:
    return min(finish_time(plan, *blocks) for plan in plans)


def all_subsets(blocks: Blocks) -> Iterable[tuple[bool, ...]]:
    return product((False, True), repeat=len(blocks[0]))


def all_prefixes(blocks: Blocks) -> list[tuple[bool, ...]]:
    number = len(blocks[0])
    return [prefix_of(full, number) for full in range(number + 1)]


def prefix_end(blocks: Blocks) -> float:
    return finish_time(prefix_of(plan_prefix(*blocks), len(blocks[0])), *blocks)


def subset_of(blocks: Blocks) -> tuple[bool, ...]:
    """The subset plan, by block."""
    runs = [Run(*times, len(list(equal))) for times, equal in groupby(zip(*blocks, strict=True))]
    numbers = plan_subset(runs)
    assert len(numbers) == len(runs)
    return tuple(chain.from_iterable(prefix_of(full, run.number) for full, run in zip(numbers, runs, strict=True)))


def test_pages_of_blocks_that_take_several() -> None:
    """If loading is the bottleneck, the blocks that save least for what they load are computed in full."""
    runs = (BlockRun(2, 4, 0.1), BlockRun(4, 1, 0.15), BlockRun(1, 4, 0.2))
    assert plan_blocks(runs, 16, 1.0, 0.2, 0.0) == ()
    assert plan_blocks(runs, 16, 1.0, 0.2, 1e9) == tuple(range(16))
    chosen = plan_blocks(runs, 16, 1.0, 0.2, 2.0)
    assert set(range(8)) < set(chosen) < set(range(16))
    assert set(range(12, 16)) <= set(chosen), "the last block, behind some that are loaded"


def test_leading_blocks_alone_where_pages_hold_keys_and_values() -> None:
    assert plan_blocks((), 4, 4.0, 1.0, 12.0) == tuple(range(plan_prefix([1.0] * 4, [0.25] * 4, [3.0] * 4)))


def same(time: float) -> object:
    return pytest.approx(time, rel=1e-9, abs=1e-9)


def test_finish_time_follows_loads_and_computing() -> None:
    """Blocks 1 and 3 are loaded, at 5 and 10; block 1 waits for its load, block 3 does not."""
    full, cached, load = [3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0], [9.0, 5.0, 9.0, 1.0]
    assert finish_time((False, False, False, False), full, cached, load) == 12
    assert finish_time((False, True, False, True), full, cached, load) == 10
    assert finish_time((), [], [], []) == 0


@settings(max_examples=150, deadline=None)
@given(equal_blocks())
def test_on_equal_blocks_no_subset_beats_the_prefix(blocks: Blocks) -> None:
    assert prefix_end(blocks) == same(soonest(all_subsets(blocks), blocks))


@pytest.mark.parametrize("load", [0.5, 1.0, 2.5, 4.0, 9.0, 100.0])
def test_on_fourteen_equal_blocks_no_subset_beats_the_prefix(load: float) -> None:
    blocks = [4.0] * 14, [1.0] * 14, [load] * 14
    assert prefix_end(blocks) == same(soonest(all_subsets(blocks), blocks))


@given(equal_blocks(largest=60))
def test_on_equal_blocks_the_papers_rule_is_never_faster(blocks: Blocks) -> None:
    assert prefix_end(blocks) <= finish_time(algorithm_1(*blocks), *blocks) * (1 + 1e-9)


def test_the_papers_rule_is_slower_somewhere() -> None:
    """It takes the first load that does not delay its own block, although waiting for it delays later ones."""
    blocks = [4.0] * 4, [1.0] * 4, [3.0] * 4
    assert prefix_end(blocks) < finish_time(algorithm_1(*blocks), *blocks)


@settings(max_examples=200, deadline=None)
@given(mixed_blocks(largest=20))
def test_the_prefix_is_the_best_of_all_prefixes(blocks: Blocks) -> None:
    assert prefix_end(blocks) == same(soonest(all_prefixes(blocks), blocks))


@settings(max_examples=300, deadline=None)
@given(mixed_blocks())
def test_the_subset_is_the_best_of_all_subsets(blocks: Blocks) -> None:
    assert finish_time(subset_of(blocks), *blocks) == same(soonest(all_subsets(blocks), blocks))


@st.composite
def runs_of_blocks(draw: st.DrawFn) -> Blocks:
    """Up to 12 blocks in up to four runs of equal ones."""
    blocks: Blocks = [], [], []
    kind = draw(st.sampled_from([times, whole_times]))
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(1, 3))
        for of_blocks in blocks:
            of_blocks += [draw(kind)] * number
    return blocks


@settings(max_examples=150, deadline=None)
@given(runs_of_blocks())
def test_the_subset_of_runs_is_the_best_of_all_subsets(blocks: Blocks) -> None:
    assert finish_time(subset_of(blocks), *blocks) == same(soonest(all_subsets(blocks), blocks))


def test_a_subset_can_beat_every_prefix_and_the_papers_rule() -> None:
    """One block in the middle takes long to load and is fast to compute."""
    blocks = [2.0, 2.0, 0.5, 2.0], [0.5, 0.5, 0.4, 0.5], [0.5, 0.5, 9.0, 0.5]
    end = finish_time(subset_of(blocks), *blocks)
    assert subset_of(blocks) == (True, True, False, True)
    assert end < soonest(all_prefixes(blocks), blocks)


def test_among_equals_the_fewest_blocks_are_computed_in_full() -> None:
    """Loads that take no time and save nothing: blocks are cached, since full blocks change pixels."""
    assert plan_prefix([1.0] * 5, [1.0] * 5, [0.0] * 5) == 0


def test_the_papers_rule_step_by_step() -> None:
    """Line 3 of Algorithm 1: max(load + L, comp) + Cw <= comp + Cwo, with Cwo 4, Cw 1, L 3."""
    assert algorithm_1([4.0] * 4, [1.0] * 4, [3.0] * 4) == (True, True, True, True)
    assert algorithm_1([4.0] * 4, [1.0] * 4, [5.0] * 4) == (False, True, False, True)

"""Block plans against exhaustive search."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.block_plan import plan_blocks, plan_prefix
from core.model_info import BlockRun

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


def end_of(plan: tuple[bool, ...], blocks: Blocks) -> float:
    """When a step with this plan ends. plan: whether each block uses its pages."""
    loaded = done = 0.0
    for uses_pages, full, cached, load in zip(plan, *blocks, strict=True):
        loaded += load if uses_pages else 0.0
        done = max(loaded, done) + cached if uses_pages else done + full
    return done


def soonest(plans: Iterable[tuple[bool, ...]], blocks: Blocks) -> float:
    return min(end_of(plan, blocks) for plan in plans)


def all_subsets(blocks: Blocks) -> Iterable[tuple[bool, ...]]:
    return product((False, True), repeat=len(blocks[0]))


def leading_in_full(number: int, blocks: Blocks) -> tuple[bool, ...]:
    return (False,) * number + (True,) * (len(blocks[0]) - number)


def all_prefixes(blocks: Blocks) -> list[tuple[bool, ...]]:
    return [leading_in_full(number, blocks) for number in range(len(blocks[0]) + 1)]


def prefix_end(blocks: Blocks) -> float:
    return end_of(leading_in_full(plan_prefix(*blocks), blocks), blocks)


def same(time: float) -> object:
    return pytest.approx(time, rel=1e-9, abs=1e-9)


def test_a_step_ends_after_its_loads_and_its_computing() -> None:
    """Blocks 1 and 3 are loaded, at 5 and 6; block 1 waits for its load, block 3 does not."""
    blocks = [3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0], [9.0, 5.0, 9.0, 1.0]
    assert end_of((False, False, False, False), blocks) == 12
    assert end_of((False, True, False, True), blocks) == 10


@settings(max_examples=150, deadline=None)
@given(equal_blocks())
def test_on_equal_blocks_no_subset_beats_the_prefix(blocks: Blocks) -> None:
    assert prefix_end(blocks) == same(soonest(all_subsets(blocks), blocks))


@pytest.mark.parametrize("load", [0.5, 1.0, 2.5, 4.0, 9.0, 100.0])
def test_on_fourteen_equal_blocks_no_subset_beats_the_prefix(load: float) -> None:
    blocks = [4.0] * 14, [1.0] * 14, [load] * 14
    assert prefix_end(blocks) == same(soonest(all_subsets(blocks), blocks))


@settings(max_examples=200, deadline=None)
@given(mixed_blocks(largest=20))
def test_the_prefix_is_the_best_of_all_prefixes(blocks: Blocks) -> None:
    assert prefix_end(blocks) == same(soonest(all_prefixes(blocks), blocks))


def test_among_equals_the_fewest_blocks_are_computed_in_full() -> None:
    """Loads of no time and computing that gains nothing: cached, since full blocks change pixels."""
    assert plan_prefix([1.0] * 5, [1.0] * 5, [0.0] * 5) == 0


def test_equal_blocks_have_a_page_each() -> None:
    assert plan_blocks((), 4, 4.0, 1.0, 12.0) == tuple(range(plan_prefix([1.0] * 4, [0.25] * 4, [3.0] * 4)))


@pytest.mark.parametrize("load", [0.0, 0.5, 2.0, 3.0, 1e9])
def test_all_pages_of_a_leading_block_are_left_out_together(load: float) -> None:
    """Blocks that differ in work and pages, as those of a UNet."""
    runs = (BlockRun(2, 4, 0.1), BlockRun(4, 1, 0.15), BlockRun(1, 4, 0.2))
    works, pages = [0.1] * 2 + [0.15] * 4 + [0.2], [4] * 2 + [1] * 4 + [4]
    blocks = [*works], [0.2 * work for work in works], [load * number / 16 for number in pages]
    chosen = plan_blocks(runs, 16, 1.0, 0.2, load)
    stops = [0, *accumulate(pages)]
    assert chosen == tuple(range(len(chosen)))
    assert end_of(leading_in_full(stops.index(len(chosen)), blocks), blocks) == same(
        soonest(all_prefixes(blocks), blocks)
    )
    assert (len(chosen) == 0) == (load == 0.0)
    assert (len(chosen) == 16) == (load == 1e9)

"""The paper's rule for block plans against ours."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.micro.block_plan import algorithm_1, finish_time
from core.block_plan import plan_prefix

times = st.one_of(st.floats(0.0, 10.0, allow_subnormal=False), st.integers(0, 12).map(float))


def ours_end(blocks: tuple[list[float], list[float], list[float]]) -> float:
    number, in_full = len(blocks[0]), plan_prefix(*blocks)
    return finish_time((False,) * in_full + (True,) * (number - in_full), *blocks)


def test_finish_time_follows_loads_and_computing() -> None:
    """Blocks 1 and 3 are loaded, at 5 and 6; block 1 waits for its load, block 3 does not."""
    full, cached, load = [3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0], [9.0, 5.0, 9.0, 1.0]
    assert finish_time((False, False, False, False), full, cached, load) == 12
    assert finish_time((False, True, False, True), full, cached, load) == 10
    assert finish_time((), [], [], []) == 0


@given(st.integers(0, 60), times, times, times)
def test_on_equal_blocks_the_papers_rule_is_never_faster(number: int, full: float, cached: float, load: float) -> None:
    blocks = [full] * number, [cached] * number, [load] * number
    assert ours_end(blocks) <= finish_time(algorithm_1(*blocks), *blocks) * (1 + 1e-9)


def test_the_papers_rule_is_slower_somewhere() -> None:
    """It takes the first load that does not hurt at once, though waiting for it costs later blocks."""
    blocks = [4.0] * 4, [1.0] * 4, [3.0] * 4
    assert ours_end(blocks) < finish_time(algorithm_1(*blocks), *blocks)


def test_the_papers_rule_step_by_step() -> None:
    """Line 3 of Algorithm 1: max(load + L, comp) + Cw <= comp + Cwo, with Cwo 4, Cw 1, L 3."""
    assert algorithm_1([4.0] * 4, [1.0] * 4, [3.0] * 4) == (True, True, True, True)
    assert algorithm_1([4.0] * 4, [1.0] * 4, [5.0] * 4) == (False, True, False, True)

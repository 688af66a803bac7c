"""The similarity of a skip level: from which on pairs are close enough."""

from __future__ import annotations

import pytest

from entrypoints.calibration.skip_levels import MIN_PAIRS, Pair, level_of


def pairs(*ssim: float, step: float = 0.01) -> list[Pair]:
    """Pairs whose prompts are less and less similar."""
    return [Pair(1 - number * step, each) for number, each in enumerate(ssim)]


def test_a_level_begins_where_nine_of_ten_pairs_are_close() -> None:
    close, far = [0.99] * 10, [0.5] * 10
    level = level_of(0.2, pairs(*close, *far), 0.96)
    assert level.similarity == pytest.approx(0.9), "with one that is far among eleven"
    assert (level.share, level.num_pairs, level.ssim_mean, level.ssim_p10) == (0.2, 11, pytest.approx(0.94545), 0.99)
    assert level_of(0.2, pairs(*close, *far), 0.4).num_pairs == 20


def test_one_of_more_than_ten_may_be_far() -> None:
    assert level_of(0.4, pairs(0.99, 0.5, *[0.99] * 19), 0.96).num_pairs == 21


def test_pairs_of_one_similarity_count_together() -> None:
    assert level_of(0.4, [Pair(0.9, each) for each in [0.99] * 10 + [0.5] * 5], 0.96).num_pairs == 0


def test_without_enough_close_pairs_only_equal_prompts_skip() -> None:
    for few in (pairs(*[0.99] * (MIN_PAIRS - 1)), pairs(*[0.5] * 20), []):
        level = level_of(0.4, few, 0.96)
        assert (level.similarity, level.num_pairs) == (1.0, 0)

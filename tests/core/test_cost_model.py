"""CostModel: recovers a line from what it sees, follows drift, and never predicts below zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cost_model import CostKey, CostModel, Work
from core.handles import ModelKey

KEY = CostKey(ModelKey("m", "transformer"), "denoise", "cpu", 1)


def seconds(work: Work, scale: float = 1.0) -> float:
    return scale * (0.004 + 0.001 * len(work.queries) + 0.03 * sum(work.queries) / 1e3)


def batches(count: int, seed: int = 0) -> list[Work]:
    random = np.random.default_rng(seed)
    return [Work.of(random.integers(40, 300, random.integers(1, 9)).tolist()) for _ in range(count)]


def test_nothing_seen_predicts_nothing() -> None:
    assert CostModel().predict(KEY, Work.of([256])) == 0.0


def test_it_recovers_a_line() -> None:
    model = CostModel()
    for work in batches(200):
        model.observe(KEY, work, seconds(work))
    for work in batches(20, seed=1):
        assert model.predict(KEY, work) == pytest.approx(seconds(work), rel=0.02)
    assert model.r_squared()[KEY] > 0.9


def test_it_follows_a_machine_that_slows_down() -> None:
    model = CostModel()
    for work in batches(300):
        model.observe(KEY, work, seconds(work))
    for work in batches(900, seed=1):
        model.observe(KEY, work, seconds(work, scale=2.0))
    work = batches(1, seed=2)[0]
    assert model.predict(KEY, work) == pytest.approx(seconds(work, scale=2.0), rel=0.05)


@given(st.lists(st.tuples(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.floats(0, 10)), max_size=20))
def test_predictions_are_never_negative(seen: list[tuple[list[int], float]]) -> None:
    model = CostModel()
    for tokens, time in seen:
        model.observe(KEY, Work.of(tokens), time)
    assert model.predict(KEY, Work.of([1])) >= 0.0
    assert model.predict(KEY, Work.of([100_000])) >= 0.0

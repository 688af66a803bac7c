"""CostModel: fits lines to its observations, follows drift, tolerates outliers, and never predicts less than zero."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.costs.cost_model import ENOUGH, CostKey, CostModel, features_of
from core.graph.work import Work
from core.handles import ModelKey

KEY = CostKey("flux", (ModelKey("0f", "transformer"),), "denoise", "cpu", 1)
TEXT, IMAGE = 24, 256  # tokens

Seconds = Callable[[Work], float]


def seconds(work: Work, scale: float = 1.0) -> float:
    """A machine whose times are an exact line of the features."""
    return scale * float(np.dot(features_of(work), [0.004, 0.001, 0.03, 0.2, 0.0005, 0.004]))


def batches(count: int, seed: int = 0) -> list[Work]:
    """Mixes of exact and mask-aware requests, 1 to 8 together."""
    random = np.random.default_rng(seed)
    return [Work.of_pairs((TEXT + active, TEXT + IMAGE) for active in draw(random)) for _ in range(count)]


def draw(random: np.random.Generator) -> list[int]:
    active = random.integers(1, IMAGE, random.integers(1, 9))
    return [IMAGE if random.random() < 0.2 else int(tokens) for tokens in active]


def trained(works: list[Work], machine: Seconds = seconds) -> CostModel:
    model = CostModel()
    for work in works:
        model.observe(KEY, work, machine(work))
    return model


def test_without_observations_nothing_is_predicted() -> None:
    assert CostModel().predict(KEY, Work.of([256])) == 0.0
    assert CostModel().predict_copy("disk", 1 << 20) == 0.0


def test_it_recovers_a_line() -> None:
    model = trained(batches(200))
    for work in batches(20, seed=1):
        assert model.predict(KEY, work) == pytest.approx(seconds(work), rel=0.02)
    assert model.r_squared()[KEY] > 0.9


def test_small_work_is_predicted_as_well_as_large() -> None:
    """Noise in proportion to large batches must not spoil predictions for small ones."""
    random = np.random.default_rng(0)
    model = trained(batches(200), lambda work: seconds(work) * random.lognormal(0, 0.05))
    for work in (Work((TEXT + 3,), (TEXT + IMAGE,)), Work.of([TEXT + IMAGE] * 8)):
        assert model.predict(KEY, work) == pytest.approx(seconds(work), rel=0.05)


def test_an_outlier_of_a_suspended_process_is_ignored() -> None:
    random = np.random.default_rng(0)
    model = trained(batches(200), lambda work: seconds(work) * (10 if random.random() < 0.05 else 1))
    for work in batches(20, seed=1):
        assert model.predict(KEY, work) == pytest.approx(seconds(work), rel=0.1)


def test_it_follows_a_machine_that_slows_down() -> None:
    model = trained(batches(300))
    for work in batches(900, seed=1):
        model.observe(KEY, work, seconds(work, scale=2.0))
    work = batches(1, seed=2)[0]
    assert model.predict(KEY, work) == pytest.approx(seconds(work, scale=2.0), rel=0.05)


def test_features_that_stop_varying_keep_their_costs() -> None:
    model = trained(batches(100))
    for _ in range(5000):
        model.observe(KEY, Work.of([TEXT + IMAGE]), seconds(Work.of([TEXT + IMAGE])))
    for work in batches(20, seed=1):
        assert model.predict(KEY, work) == pytest.approx(seconds(work), rel=0.1)


def test_a_first_observation_is_a_fair_guess_at_more_of_the_same() -> None:
    model = trained([Work.of([256])])
    assert model.predict(KEY, Work.of([256])) == pytest.approx(seconds(Work.of([256])), rel=0.01)
    assert 1.0 < model.predict(KEY, Work.of([256] * 4)) / seconds(Work.of([256])) <= 4.0


def test_copies_cost_by_their_bytes_and_tiers() -> None:
    model = CostModel()
    for megabytes in (1, 2, 8, 4):
        model.observe_copy("disk", "host", megabytes * 10**6, 0.001 + 0.002 * megabytes)
        model.observe_copy("host", "disk", megabytes * 10**6, 1.0)
    assert model.predict_copy("disk", 6 * 10**6) == pytest.approx(0.013, rel=0.01)
    assert model.predict_copy("host", 6 * 10**6) == 0.0


@given(st.lists(st.tuples(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.floats(0, 10)), max_size=20))
def test_predictions_are_never_negative(seen: list[tuple[list[int], float]]) -> None:
    model = CostModel()
    for tokens, time in seen:
        model.observe(KEY, Work.of(tokens), time)
    assert model.predict(KEY, Work.of([1])) >= 0.0
    assert model.predict(KEY, Work.of([100_000])) >= 0.0


def test_a_size_of_batches_counts_as_seen_once_so_many_have_run() -> None:
    model = CostModel()
    for rows, number, seen in ((4, ENOUGH - 1, 0), (2, ENOUGH, 2), (4, 1, 4), (3, ENOUGH, 4)):
        for _ in range(number):
            model.observe(KEY, Work.of([64] * rows), 1e-3)
        assert model.largest_seen(KEY) == seen

"""Latency tables: what was measured is predicted exactly, what lies between linearly, and all else by the line."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.costs.cost_model import CostKey, CostModel
from core.costs.latency_table import LatencyTable, largest_batch
from core.costs.profile import Profile, profile_of
from core.graph.work import Work

KEY = CostKey("f", (), "denoise", "cpu", 1)
GRID = [(rows, tokens, 0.01 * rows + 1e-4 * tokens * rows) for rows in (1, 2, 4, 8) for tokens in (100, 300, 1000)]


def test_a_table_is_exact_where_measured_and_linear_between() -> None:
    table = LatencyTable(GRID)
    assert all(table.seconds(rows, tokens) == pytest.approx(seconds) for rows, tokens, seconds in GRID)
    assert table.seconds(3, 200) == pytest.approx(0.01 * 3 + 1e-4 * 200 * 3)
    assert (table.largest, table.tokens) == (8, (100, 300, 1000))


def test_a_table_says_nothing_of_what_lies_outside() -> None:
    table = LatencyTable(GRID)
    assert [table.seconds(*size) for size in ((9, 100), (1, 99), (1, 1001))] == [None, None, None]


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([64.0, 256.0]), st.floats(1e-4, 1.0)), min_size=1))
def test_predictions_stay_within_what_was_measured(measured: list[tuple[int, float, float]]) -> None:
    table = LatencyTable(measured)
    for tokens in {tokens for _, tokens, _ in measured}:
        sizes = {rows for rows, level, _ in measured if level == tokens and rows <= table.largest}
        of_level = [seconds for _, level, seconds in measured if level == tokens]
        for rows in range(min(sizes, default=1), table.largest + 1) if len(sizes) > 1 else ():
            seconds = table.seconds(rows, tokens)
            assert seconds is not None
            assert min(of_level) - 1e-12 <= seconds <= max(of_level) + 1e-12


@pytest.mark.parametrize("measured", [[], [(0, 1.0, 1.0)], [(1, 1.0, 0.0)]])
def test_an_unusable_table_is_refused(measured: list[tuple[int, float, float]]) -> None:
    with pytest.raises(ValueError, match="a latency table needs"):
        LatencyTable(measured)


def test_a_cap_is_the_largest_batch_within_the_share() -> None:
    """As measured on a GPU: four together take longer than five."""
    measured = {1: 33, 2: 32, 3: 33, 4: 36, 5: 34, 6: 37}
    assert [largest_batch(measured.__getitem__, share, 6) for share in (31, 32, 33, 35, 36, 40)] == [0, 2, 3, 5, 5, 6]
    assert largest_batch(measured.__getitem__, 40, 4) == 4


# ------------------------------------------------------------------------------------------------- the cost model


def work(rows: int, tokens: int) -> Work:
    return Work.of([tokens] * rows)


def model() -> CostModel:
    cost = CostModel()
    for rows in (1, 2, 3, 4):
        cost.observe(KEY, work(rows, 100), 0.1 * rows)
    cost.add_profile(KEY, Profile(LatencyTable([(1, 100.0, 0.2), (4, 100.0, 0.5)])))
    return cost


def test_profiled_work_is_predicted_from_its_table_and_other_work_by_the_line() -> None:
    cost = model()
    assert cost.predict(KEY, work(2, 100)) == pytest.approx(0.3)
    assert cost.predict(KEY, work(8, 100)) == pytest.approx(0.8, rel=0.05)
    assert cost.predict(CostKey("f", (), "decode", "cpu", 1), work(1, 100)) == 0.0
    assert cost.predict(KEY, Work((), ())) >= 0.0


def test_masked_rows_are_predicted_from_the_table_of_their_number_of_tokens() -> None:
    """Of 50 tokens computed, those that attend to 400 cost more than a picture that has no others."""
    exact = [(work(rows, tokens), 1e-3 * rows * tokens) for rows in (1, 2) for tokens in (50, 100)]
    masked = [(Work.of_pairs([(tokens, 400)] * rows), 1e-2 * rows * tokens) for rows in (1, 2) for tokens in (50, 400)]
    profile = profile_of(exact + masked + [(work(rows, 400), 1.0) for rows in (1, 2)])
    assert profile is not None
    assert profile.largest == 2
    assert profile.seconds(work(2, 75)) == pytest.approx(0.15)
    assert profile.seconds(Work.of_pairs([(75, 400)])) == pytest.approx(0.5 + (25 / 350) * (2.5 - 0.5))
    assert profile.seconds(Work.of_pairs([(75, 300)])) is None
    assert profile_of(masked[:1]) is None, "without exact rows"


def test_a_slower_machine_stretches_the_table() -> None:
    cost = model()
    cost.observe(KEY, work(1, 100), 20.0)  # preempted once
    assert cost.predict(KEY, work(4, 100)) < 0.52
    for _ in range(300):
        cost.observe(KEY, work(1, 100), 0.3)
    assert cost.predict(KEY, work(4, 100)) == pytest.approx(0.75, rel=0.01)
    profile = cost.profile(KEY)
    assert profile is not None
    assert profile.stretch == pytest.approx(1.5, rel=0.01)


def test_a_profile_takes_less_than_a_megabyte() -> None:
    """Of ten ops with 64 batch sizes at 8 numbers of tokens each."""
    table = LatencyTable([(rows, 512.0 * level, 1e-3 * rows) for rows in range(1, 65) for level in range(1, 9)])
    of_points = sum(
        sys.getsizeof(point) + sum(map(sys.getsizeof, point)) for line in table._levels.values() for point in line
    )
    assert 10 * (of_points + sum(sys.getsizeof(line) for line in table._levels.values())) < 1e6

"""ExactSum: a sum of floats from which terms can be removed again."""

from __future__ import annotations

from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.costs.exact_sum import ExactSum

SECONDS = st.lists(st.floats(0.0, 1e6), max_size=20)


@given(staying=SECONDS, leaving=SECONDS)
def test_removed_terms_leave_nothing_behind(staying: list[float], leaving: list[float]) -> None:
    total, alone = ExactSum(), ExactSum()
    for term in (*leaving, *staying):
        total.add(term)
    for term in reversed(leaving):
        total.remove(term)
    for term in reversed(staying):
        alone.add(term)
    assert float(total) == float(alone) == pytest.approx(fsum(staying), rel=1e-14, abs=1e-16)


def test_a_sum_of_floats_would_drift() -> None:
    """Shows what the class is for."""
    assert 1e6 + 1e-3 - 1e6 != 1e-3
    total = ExactSum()
    total.add(1e6)
    total.add(1e-3)
    total.remove(1e6)
    assert float(total) == pytest.approx(1e-3, abs=1e-17)

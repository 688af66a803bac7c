"""How much later than predicted results come."""

from __future__ import annotations

import pytest

from core.costs.prediction_margin import FORGET_SECONDS, LEAST_OUTCOMES, WINDOW, UsualDelay


def test_the_usual_delay_is_the_median_of_the_last_results() -> None:
    delay = UsualDelay()
    assert delay.seconds(0.0) == 0.0
    for _ in range(LEAST_OUTCOMES // 2 - 1):
        delay.observe(1.0, 3.0, 0.0)
    assert delay.seconds(0.0) == 0.0, "most may have none"
    delay.observe(1.0, 3.0, 0.0)
    assert delay.seconds(0.0) == 2.0
    for _ in range(WINDOW):
        delay.observe(1.0, 0.5, 10.0)
    assert delay.seconds(10.0) == 0.0, "none comes too early"


def test_a_delay_is_forgotten_though_no_result_tells_that_it_has_gone() -> None:
    delay = UsualDelay()
    for _ in range(WINDOW):
        delay.observe(0.0, 5.0, 100.0)
    assert delay.seconds(100.0 + FORGET_SECONDS) == pytest.approx(5.0)
    assert delay.seconds(101.0 + FORGET_SECONDS) == 0.0

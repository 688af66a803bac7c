"""Admission: which edits are refused, and which have the objective."""

from __future__ import annotations

import pytest

from core.costs.prediction_margin import PredictionMargin
from core.routing.admission import Outlook, Terms, Verdict, judge


def margin_of(*ratios: float) -> PredictionMargin:
    """A margin after many such outcomes."""
    margin = PredictionMargin()
    for _ in range(100):
        for ratio in ratios:
            margin.observe(2.0, 2.0 * ratio)
    return margin


EXACT = margin_of(1.0)


def test_the_margin_covers_nine_of_ten_outcomes() -> None:
    assert EXACT.high == pytest.approx(1.0)
    assert margin_of(*[1.0] * 8, 2.0, 3.0).high == pytest.approx(3.0), "one of ten is as bad as that"
    assert margin_of(*[1.0] * 19, 3.0).high == pytest.approx(1.0)
    assert 1.0 <= PredictionMargin().high <= 2.0, "before anything is known"


def test_without_an_objective_or_timeout_every_edit_is_admitted() -> None:
    assert judge(Outlook(1000.0, 1.0, is_idle=False), Terms(None, None), EXACT) == Verdict()


def test_a_busy_server_admits_edits_that_may_miss_the_objective() -> None:
    """The scheduling policy may serve them first."""
    busy = Outlook(60.0, 5.0, is_idle=False)
    assert judge(busy, Terms(timeout=6.0, slo=10.0), EXACT) == Verdict(has_objective=True)


def test_an_edit_that_may_miss_the_objective_on_an_idle_server_has_none() -> None:
    """It is finished, however late."""
    terms, within = Terms(timeout=None, slo=1.0), Outlook(0.9, 0.9, is_idle=True)
    assert judge(Outlook(5.0, 5.0, is_idle=True), terms, EXACT) == Verdict()
    assert judge(Outlook(5.0, 0.9, is_idle=True), terms, EXACT) == Verdict(), "its template is to be primed first"
    assert judge(within, terms, EXACT).has_objective
    assert not judge(within, terms, margin_of(1.0, 2.0)).has_objective, "it may take twice as long"


def test_only_edits_that_would_time_out_even_alone_are_refused() -> None:
    terms = Terms(timeout=4.0, slo=None)
    for seconds, alone, is_idle in ((6.0, 1.0, False), (4.5, 4.5, True)):
        assert not judge(Outlook(seconds, alone, is_idle), terms, EXACT).is_hopeless, "it might make it"
    for seconds, is_idle in ((9.0, True), (20.0, False)):
        assert judge(Outlook(seconds, 9.0, is_idle), terms, EXACT).is_hopeless

"""Admission: which edits are admitted, which are refused, and with which retry-after."""

from __future__ import annotations

import pytest

from core.costs.prediction_margin import PredictionMargin
from core.routing.admission import Outlook, Terms, judge


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
    verdict = judge(Outlook(1000.0, 1.0, is_idle=False), Terms(None, None), EXACT)
    assert verdict.refused is None
    assert not verdict.has_objective


def test_edits_that_would_miss_the_objective_are_refused() -> None:
    terms = Terms(timeout=None, slo=10.0)
    in_time, late = (judge(Outlook(seconds, 2.0, is_idle=False), terms, EXACT) for seconds in (9.5, 14.0))
    assert in_time.refused is None
    assert in_time.has_objective
    assert late.refused == "slo"
    assert late.retry_after == pytest.approx(4.0), "by then so much of what is there is done"


def test_the_prediction_margin_counts_only_on_a_busy_server() -> None:
    unsure = margin_of(1.0, 2.0)
    terms = Terms(timeout=None, slo=10.0)
    assert judge(Outlook(6.0, 2.0, is_idle=False), terms, unsure).refused == "slo"
    idle = judge(Outlook(6.0, 6.0, is_idle=True), terms, unsure)
    assert idle.refused is None
    assert not idle.has_objective, "it is finished, however late"


def test_an_edit_that_cannot_meet_the_objective_is_served_when_idle() -> None:
    terms = Terms(timeout=None, slo=1.0)
    assert judge(Outlook(5.0, 5.0, is_idle=True), terms, EXACT).refused is None
    busy = judge(Outlook(8.0, 5.0, is_idle=False), terms, EXACT)
    assert busy.refused == "slo"
    assert busy.retry_after == pytest.approx(3.0), "until the server is idle"


def test_edits_that_would_time_out_are_refused() -> None:
    terms = Terms(timeout=4.0, slo=None)
    assert judge(Outlook(3.9, 1.0, is_idle=False), terms, EXACT).refused is None
    late = judge(Outlook(6.0, 1.0, is_idle=False), terms, EXACT)
    assert (late.refused, late.retry_after) == ("timeout", pytest.approx(2.0))
    assert judge(Outlook(4.5, 4.5, is_idle=True), terms, EXACT).refused is None, "it might make it"
    assert judge(Outlook(9.0, 9.0, is_idle=True), terms, EXACT).refused == "hopeless"
    assert judge(Outlook(20.0, 9.0, is_idle=False), terms, EXACT).refused == "hopeless"


def test_a_timeout_and_the_objective_hold_together() -> None:
    terms = Terms(timeout=4.0, slo=10.0)
    assert judge(Outlook(6.0, 1.0, is_idle=False), terms, EXACT).refused == "timeout"
    assert judge(Outlook(6.0, 1.0, is_idle=False), Terms(timeout=40.0, slo=5.0), EXACT).refused == "slo"


def test_an_objective_that_cannot_be_met_is_none_on_an_idle_server_for_any_policy() -> None:
    """Else a policy that gives up requests would serve none at all. A busy server has others for it to choose from."""
    terms = Terms(timeout=None, slo=1.0)
    idle, busy = (judge(Outlook(5.0, 5.0, is_idle), terms, EXACT, gives_up=True) for is_idle in (True, False))
    assert (idle.refused, idle.has_objective) == (None, False)
    assert (busy.refused, busy.has_objective) == (None, True)
    within = Outlook(0.9, 0.9, is_idle=True)
    assert judge(within, terms, EXACT, gives_up=True).has_objective
    assert not judge(within, terms, margin_of(1.0, 2.0), gives_up=True).has_objective, "it may take twice as long"


def test_a_policy_that_gives_up_requests_itself_is_shown_all_that_are_not_hopeless() -> None:
    busy, terms = Outlook(60.0, 5.0, is_idle=False), Terms(timeout=6.0, slo=10.0)
    assert judge(busy, terms, EXACT).refused == "timeout"
    verdict = judge(busy, terms, EXACT, gives_up=True)
    assert (verdict.refused, verdict.has_objective) == (None, True)
    assert judge(busy, Terms(timeout=3.0, slo=None), EXACT, gives_up=True).refused == "hopeless"

"""Headroom: how a planner's reserve of time follows its failures."""

import pytest

from core.scheduling.policies.planner.headroom import FALL, LEAST, MOST, RISE, Headroom


def test_it_rises_with_wasted_work_and_falls_as_requests_end() -> None:
    headroom = Headroom()
    headroom.note_wasted()
    assert headroom.value == LEAST + RISE
    headroom.note_end()
    assert headroom.value == pytest.approx(LEAST + RISE - FALL)


def test_it_stays_within_its_bounds() -> None:
    headroom = Headroom()
    headroom.note_end()
    assert headroom.value == LEAST
    for _ in range(1000):
        headroom.note_wasted()
    assert headroom.value == MOST

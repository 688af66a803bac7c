"""How much sooner than due requests are planned to be done."""

from __future__ import annotations

import pytest

from core.scheduling.policies.planner.headroom import FALL, LEAST, MOST, RISE, Headroom


def test_it_grows_with_steps_for_nothing_and_shrinks_with_every_end() -> None:
    headroom = Headroom()
    headroom.note_wasted()
    headroom.note_end()
    assert headroom.value == pytest.approx(LEAST + RISE - FALL)


def test_it_stays_within_its_bounds() -> None:
    headroom = Headroom()
    headroom.note_end()
    assert headroom.value == LEAST
    for _ in range(100):
        headroom.note_wasted()
    assert headroom.value == MOST
    for _ in range(100):
        headroom.note_end()
    assert headroom.value == LEAST

"""What is learnt of the way to another machine."""

from __future__ import annotations

import pytest

from engine.cluster.pace import EXPECTED_BYTES_PER_SECOND, LEAST_BYTES, Pace

MB = 1_000_000


def test_a_way_is_taken_for_that_of_slow_cores_until_something_is_measured() -> None:
    assert Pace().byte_seconds == pytest.approx(1 / EXPECTED_BYTES_PER_SECOND)


def test_it_follows_the_way_and_counts_no_time_in_which_nothing_was_under_way() -> None:
    pace, now = Pace(), 0.0
    for byte_seconds in (1e-8, 1e-9):
        for _ in range(100):
            now += 60.0
            pace.begin(now)
            for _ in range(3):  # of one array
                now += MB * byte_seconds
                pace.note_answered(MB, now)
        assert pace.byte_seconds == pytest.approx(byte_seconds, rel=0.1)


def test_what_is_small_shows_nothing() -> None:
    pace = Pace()
    pace.begin(0.0)
    pace.note_answered(LEAST_BYTES - 1, 1.0)
    assert pace.byte_seconds == Pace().byte_seconds
    pace.note_answered(1, 1.0)
    assert pace.byte_seconds > Pace().byte_seconds


def test_a_connection_that_breaks_is_no_slow_way() -> None:
    pace = Pace()
    pace.begin(0.0)
    pace.note_answered(MB, 8.0)
    assert pace.byte_seconds < 10 * Pace().byte_seconds

"""Restarts: back-off, the limit in a row, and the time limit of a start."""

from __future__ import annotations

from core.restarts import MAX_RESTARTS, MAX_WAIT_SECONDS, MIN_RESTART_SECONDS, Restarts, restart_limit, wait_before


def test_restarts_in_a_row_wait_twice_as_long_each_up_to_a_bound() -> None:
    assert [wait_before(restarts) for restarts in range(5)] == [0, 1, 2, 4, 8]
    assert wait_before(50) == MAX_WAIT_SECONDS


def test_a_process_that_keeps_dying_is_given_up_and_one_that_has_served_a_while_starts_over() -> None:
    restarts, waits = Restarts(), []
    restarts.note_up(0.0)
    while restarts.may_restart(1.0, proven_seconds=10.0):
        waits.append(restarts.next_wait())
    assert waits == [0, 1, 2, 4]
    assert restarts.in_a_row == MAX_RESTARTS
    assert not restarts.may_restart(100.0, proven_seconds=10.0), "it was not up in between"
    restarts.note_up(100.0)
    assert not restarts.may_restart(109.0, proven_seconds=10.0)
    restarts.note_up(110.0)
    assert restarts.may_restart(120.0, proven_seconds=10.0)
    assert restarts.next_wait() == 0


def test_a_restart_may_take_longer_than_the_first_start_but_not_longer_than_that_was_allowed() -> None:
    assert restart_limit(1.0, 1800.0) == MIN_RESTART_SECONDS
    assert restart_limit(100.0, 1800.0) == 1000.0
    assert restart_limit(500.0, 1800.0) == 1800.0

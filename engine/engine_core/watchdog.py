"""Watchdogs that detect hanging processes: Watchdog for an engine's workers, SilenceWatch for an engine itself.

A time limit is split over several timers in a row: if this process itself was suspended, only the first one expires
when it resumes, and the watched process has the rest of the time to answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE = 20.0
"""How many times longer than predicted a worker's answer may take."""

LOOKS = 4
"""Checks of a SilenceWatch per time limit."""


class Watchdog:
    """Runs in the engine, with one timer per worker that has work. `on_hang` is called with the rank of a worker that
    gave no answer in time, and with its time limit in seconds: max(hang_seconds + allowed, PATIENCE * predicted).
    """

    def __init__(self, hang_seconds: float, on_hang: Callable[[int, float], None]) -> None:
        self._hang_seconds = hang_seconds
        self._on_hang = on_hang
        self._timers: dict[int, asyncio.TimerHandle] = {}  # rank -> timer of half its time limit
        self._seconds: dict[int, float] = {}  # rank -> its time limit

    def is_watching(self, rank: int) -> bool:
        """Whether an answer from this worker is expected."""
        return rank in self._timers

    def expect(self, rank: int, predicted_seconds: float, allowed_seconds: float = 0.0) -> None:
        """Start a worker's time limit. predicted_seconds: predicted time of the work that it has. allowed_seconds: time
        limits of its work, which the worker itself watches.
        """
        self._start(rank, max(self._hang_seconds + allowed_seconds, PATIENCE * predicted_seconds))

    def _start(self, rank: int, seconds: float) -> None:
        self.note_answer(rank)
        self._seconds[rank] = seconds
        self._timers[rank] = asyncio.get_running_loop().call_later(seconds / 2, self._half_over, rank, seconds)

    def note_answer(self, rank: int) -> None:
        """Stop a worker's time limit: it has answered."""
        timer = self._timers.pop(rank, None)
        if timer is not None:
            timer.cancel()
            del self._seconds[rank]

    def extend(self) -> None:
        """Restart the time limits of all workers: they may have waited for one that hangs."""
        for rank, seconds in list(self._seconds.items()):
            self._start(rank, seconds)

    def close(self) -> None:
        """Stop all timers."""
        for rank in list(self._timers):
            self.note_answer(rank)

    def _half_over(self, rank: int, seconds: float) -> None:
        self._timers[rank] = asyncio.get_running_loop().call_later(seconds / 2, self._on_hang, rank, seconds)


class SilenceWatch:
    """Runs in the API server. Calls `on_silence` once when an engine has sent nothing for `seconds` to 1.25 times as
    long. Starts with the first call of `note_message`.
    """

    def __init__(self, seconds: float, on_silence: Callable[[], None]) -> None:
        self._seconds_per_look = seconds / LOOKS
        self._on_silence = on_silence
        self._silent_looks = 0  # checks since the last message
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def note_message(self) -> None:
        """Note a message from the engine."""
        self._silent_looks = 0
        if self._timer is None and not self._is_closed:
            self._look_later()

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds_per_look, self._look)

    def _look(self) -> None:
        self._silent_looks += 1
        if self._silent_looks <= LOOKS:  # `<=`: the last message may have come just before the first check
            self._look_later()
        else:
            self._on_silence()

"""Watchdogs: they notice workers that are alive but give no answer, and engines that give no sign of life.

Their patience is counted in parts, each by a timer of its own: where this process itself was stopped for a while, the
first part may be over at once, but those watched get the others to answer in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE = 20.0
"""How many times longer than predicted work may take."""

LOOKS = 4
"""How often in its time a silence is looked at."""


class Watchdog:
    """One timer per worker that has work. `on_hang` is called with the rank of one that gave no answer in
    max(hang_seconds, PATIENCE * predicted seconds), and with these seconds.
    """

    def __init__(self, hang_seconds: float, on_hang: Callable[[int, float], None]) -> None:
        self._hang_seconds = hang_seconds
        self._on_hang = on_hang
        self._timers: dict[int, asyncio.TimerHandle] = {}  # rank -> half of its patience

    def is_watching(self, rank: int) -> bool:
        """Whether an answer of this worker is awaited."""
        return rank in self._timers

    def expect(self, rank: int, predicted_seconds: float) -> None:
        """The worker has work, of which the next answer is predicted to come so soon."""
        self.heard(rank)
        seconds = max(self._hang_seconds, PATIENCE * predicted_seconds)
        self._timers[rank] = asyncio.get_running_loop().call_later(seconds / 2, self._half_over, rank, seconds)

    def heard(self, rank: int) -> None:
        """The worker has answered."""
        timer = self._timers.pop(rank, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Await nothing any more."""
        for rank in list(self._timers):
            self.heard(rank)

    def _half_over(self, rank: int, seconds: float) -> None:
        self._timers[rank] = asyncio.get_running_loop().call_later(seconds / 2, self._on_hang, rank, seconds)


class SilenceWatch:
    """Calls `on_silence`, once, when nothing was heard for `seconds`, or up to a quarter longer. Begins when something
    is heard for the first time.
    """

    def __init__(self, seconds: float, on_silence: Callable[[], None]) -> None:
        self._seconds_per_look = seconds / LOOKS
        self._on_silence = on_silence
        self._silent_looks = 0  # since something was heard
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def heard(self) -> None:
        """There was a sign of life."""
        self._silent_looks = 0
        if self._timer is None and not self._is_closed:
            self._look_later()

    def close(self) -> None:
        """Await nothing any more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds_per_look, self._look)

    def _look(self) -> None:
        self._silent_looks += 1
        if self._silent_looks <= LOOKS:  # something may have been heard just before the first
            self._look_later()
        else:
            self._on_silence()

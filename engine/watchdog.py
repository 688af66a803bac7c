"""Watchdog: notices workers that are alive but give no answer.

Its patience is counted in two halves, each by a timer of its own: where this process itself was stopped for a while,
the first half may be over at once, but the workers get the second one to answer in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE = 20.0
"""How many times longer than predicted work may take."""


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

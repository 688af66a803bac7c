"""Clock: simulated time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Clock:
    """Simulated seconds, and a queue of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()  # of events at one time: as they were made

    def at(self, when: float, event: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._order), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def stop(self) -> None:
        """Forget all events, so that `run` ends."""
        self._events.clear()

    def run(self) -> None:
        """Run until no event is left."""
        while self._events:
            self.now, _, event = heappop(self._events)
            event()

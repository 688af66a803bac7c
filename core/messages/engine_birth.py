"""EngineBirth: when an engine was born, by the clock of its router.

Machines have different clocks. A time in a message between a router and an engine is therefore the engine's *age*:
seconds since the birth of this incarnation, negative for what was before. The engine knows its birth; its router
estimates it here. Both keep times of their own clocks and move them by the birth when they send and receive.
"""

from __future__ import annotations

from math import inf

WINDOW_SECONDS = 10.0
"""How long a message counts, and at most twice as long: clocks of two machines drift apart, by up to 0.5 ms a second
while one is being set. An engine sends at least one message a second."""


class EngineBirth:
    """A message may be late and is never early: the time at which it came, less the engine's age when it was sent, is
    at or after the birth. The least of these differences of the last messages counts.

    Durations since the moment of sending would be wrong by what each message is late: images of one call, which have
    the same arrival, would change places.
    """

    def __init__(self) -> None:
        self._least = self._least_before = inf  # in this window, and in the one before it
        self._window_ends = -inf

    def note(self, age: float, now: float) -> None:
        """Note a message that came at `now`, seconds of CLOCK_MONOTONIC, and was sent when the engine had this age."""
        if now >= self._window_ends:
            self._least_before, self._least = self._least, inf
            self._window_ends = now + WINDOW_SECONDS
        self._least = min(self._least, now - age)

    @property
    def time(self) -> float:
        """When it was born, seconds of CLOCK_MONOTONIC; after the first message. No age in a message that was noted
        lies in the future by it.
        """
        return min(self._least, self._least_before)

"""Pace: what a byte takes on the way to another machine, learnt from what was sent, for both directions."""

from __future__ import annotations

EXPECTED_BYTES_PER_SECOND = 0.3e9
"""Of two connections that are encrypted, before anything was measured: what slow cores do."""

LEAST_BYTES_PER_SECOND = 10e6
"""Less was no way, but a broken connection: an engine whose way seems that slow would get no more requests that show
the opposite."""

LEAST_BYTES = 256 * 1024
"""Of an observation: what less takes says more of the way's length than of its width."""

WEIGHT_BYTES = 64e6
"""The last observations count that have so many bytes together, about."""


class Pace:
    """Of the time during which bytes were under way. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._bytes, self._seconds = WEIGHT_BYTES / 16, WEIGHT_BYTES / 16 / EXPECTED_BYTES_PER_SECOND
        self._since, self._answered = 0.0, 0

    @property
    def byte_seconds(self) -> float:
        """Seconds for each byte, until the other end has it."""
        return self._seconds / self._bytes

    def begin(self, now: float) -> None:
        """The first bytes are sent after all others were answered."""
        self._since, self._answered = now, 0

    def note_answered(self, nbytes: int, now: float) -> None:
        """The other end has said that it has so many more bytes."""
        self._answered += nbytes
        if self._answered >= LEAST_BYTES:
            seconds = min(now - self._since, self._answered / LEAST_BYTES_PER_SECOND)
            kept = max(0.0, 1.0 - self._answered / WEIGHT_BYTES)
            self._bytes = kept * self._bytes + self._answered
            self._seconds = kept * self._seconds + seconds
            self.begin(now)

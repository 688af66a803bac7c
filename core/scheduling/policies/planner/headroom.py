"""Headroom: the reserve of time with which requests are planned to be done before they are due."""

from __future__ import annotations

LEAST, MOST = 1.03, 1.13
"""Bounds of the headroom: the time until a request is due, as a multiple of the time that it may be planned to take.
Where steps take what is predicted, LEAST loses nothing; a server needs more, because its steps vary.
"""

RISE, FALL = 0.01, 0.003
"""Headroom grows by RISE when a request that had begun is given up, and shrinks by FALL when a request ends."""


class Headroom:
    """The headroom of one policy, learnt from its failures. Plans are not exact: steps take unequal times, and
    newcomers wait until a step ends. A request that is given up after it had begun was planned too tightly, and its
    steps were in vain.
    """

    def __init__(self) -> None:
        self.value = LEAST

    def note_wasted(self) -> None:
        """Note that a request that had begun is given up."""
        self.value = min(MOST, self.value + RISE)

    def note_end(self) -> None:
        """Note that a request has ended."""
        self.value = max(LEAST, self.value - FALL)

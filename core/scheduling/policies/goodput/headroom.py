"""Headroom: how much sooner than due requests are planned to be done."""

from __future__ import annotations

LEAST, MOST = 1.03, 1.13
"""Bounds of the time that requests have, as a multiple of what they may be planned to take. With the published traces
(docs/scheduling.md) the least loses nothing anywhere, and a constant 1.05 a tenth of the goodput where objectives are
1.2 times the time alone. On a server more is better, as its steps vary.
"""

RISE, FALL = 0.01, 0.003
"""With every request that is given up after it had begun, and with every one that ends."""


class Headroom:
    """Of one policy. Plans are not exact: steps take unequal times, and newcomers wait for one to end. A request that
    had begun and is given up was planned too tightly, and its steps were for nothing.
    """

    def __init__(self) -> None:
        self.value = LEAST

    def note_wasted(self) -> None:
        """Note that a request is given up that had begun."""
        self.value = min(MOST, self.value + RISE)

    def note_end(self) -> None:
        """Note that a request has ended."""
        self.value = max(LEAST, self.value - FALL)

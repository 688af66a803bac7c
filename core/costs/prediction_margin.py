"""PredictionMargin: by how much actual times exceed predicted ones, learnt from the last requests."""

from __future__ import annotations

from collections import deque

WINDOW = 32
"""Outcomes that a margin looks at: so many after a hiccup, it is forgotten."""


START_RATIOS = (1.0,) * 6 + (1.5,) * 2
"""Outcomes that it begins with."""


HIGH = 0.9
"""Share of outcomes that `PredictionMargin.high` covers. Simulated, with steps that take 1.4 times what was predicted and vary by
a third, 2.6 times the load that a server can take costs a fifth of the goodput at 0.7, and nothing at 0.9.
"""


CERTAIN = 0.7
"""Share of its predicted time that even a lucky edit takes: work is called hopeless only if that is too long."""


class PredictionMargin:
    """Actual time / predicted time of the last requests."""

    def __init__(self) -> None:
        self._ratios = deque(START_RATIOS, WINDOW)

    @property
    def high(self) -> float:
        """What most requests stay under."""
        return sorted(self._ratios)[int(HIGH * len(self._ratios))]

    def observe(self, predicted: float, actual: float) -> None:
        """What was predicted to take so many seconds > 0 has taken so many."""
        self._ratios.append(actual / predicted)

"""PredictionMargin: the factor by which actual times exceed predicted ones, learnt from the last requests."""

from __future__ import annotations

from collections import deque

WINDOW = 32
"""Number of outcomes remembered: a disturbance is forgotten after this many."""


START_RATIOS = (1.0,) * 6 + (1.5,) * 2
"""Initial outcomes, as if observed."""


HIGH = 0.9
"""Share of outcomes that `PredictionMargin.high` covers. In simulation, with steps that take 1.4 times the prediction
and vary by a third, 2.6 times the load of full capacity costs a fifth of the goodput at 0.7, and nothing at 0.9.
"""


CERTAIN = 0.7
"""Least share of its predicted time that an edit takes: it counts as hopeless only if even that is too long."""


class PredictionMargin:
    """Ratios of actual to predicted time of the last requests."""

    def __init__(self) -> None:
        self._ratios = deque(START_RATIOS, WINDOW)

    @property
    def high(self) -> float:
        """The ratio that most requests stay below."""
        return sorted(self._ratios)[int(HIGH * len(self._ratios))]

    def observe(self, predicted: float, actual: float) -> None:
        """Note an outcome, in seconds. predicted: above 0."""
        self._ratios.append(actual / predicted)

"""How much actual times exceed predicted ones, learnt from the last requests: as a factor, and in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

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
        return _least_above(self._ratios, HIGH)

    def observe(self, predicted: float, actual: float) -> None:
        """Note an outcome, in seconds. predicted: above 0."""
        self._ratios.append(actual / predicted)


FORGET_SECONDS = 60.0
"""After so long a delay does not count any more: while it makes all results hopeless, none tells that it has gone."""


LEAST_OUTCOMES = 8
"""Fewer tell little."""


class UsualDelay:
    """Seconds by which the last results came later than predicted: what their computing does not explain. All times are
    seconds of one clock.
    """

    def __init__(self) -> None:
        self._outcomes = deque[tuple[float, float]](maxlen=WINDOW)  # (when, delay)

    def seconds(self, now: float) -> float:
        """The median; with few outcomes as if there were others without any delay."""
        recent = [delay for when, delay in self._outcomes if now - when <= FORGET_SECONDS]
        return _least_above([*recent, *(0.0,) * (LEAST_OUTCOMES - len(recent))], 0.5)

    def observe(self, predicted: float, actual: float, now: float) -> None:
        """Note an outcome, in seconds."""
        self._outcomes.append((now, max(0.0, actual - predicted)))


def _least_above(values: Collection[float], share: float) -> float:
    """The least of them that is above this share of them, which is under 1."""
    return sorted(values)[int(share * len(values))]

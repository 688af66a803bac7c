"""What admission did for policies that left lateness to the scheduler: it refused edits that would be late."""

from __future__ import annotations

from core.costs.prediction_margin import PredictionMargin
from core.routing.admission import Outlook


def is_refused(outlook: Outlook, slo: float, margin: PredictionMargin) -> bool:
    """Whether an edit is refused because of the latency objective, in seconds. An idle server never refuses it."""
    return not outlook.is_idle and outlook.seconds * margin.high > slo

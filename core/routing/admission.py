"""Admission: whether an edit can be done in time, decided before any work is done for it.

It is to be done by its own `timeout` (hard: its client is gone by then) and within the server's objective, `--slo-ms`
(soft: late is worth less, but better than never). Predictions are off by more or less; how far, `PredictionMargin` learns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.costs.prediction_margin import CERTAIN, PredictionMargin

RefusedFor = Literal["slo", "timeout", "hopeless"]
"""slo, timeout: it would miss the objective, or its own timeout, as busy as the server is. hopeless: it would miss its
timeout even on an idle one.
"""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is predicted of an edit. seconds: from now until its pictures are finished; alone: likewise, on an idle
    server. is_idle: nothing else is done where it would go.
    """

    seconds: float
    alone: float
    is_idle: bool


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds that an edit has from now on, None = as long as it takes. slo: of the server's objective."""

    timeout: float | None
    slo: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """refused: why the edit is not let in, None = it is. retry_after: seconds until one like it is predicted to be.
    has_objective: it is let in because it will meet the objective, and has lost its purpose when it cannot any more.
    """

    refused: RefusedFor | None = None
    retry_after: float = 0.0
    has_objective: bool = False


def judge(outlook: Outlook, terms: Terms, margin: PredictionMargin) -> Verdict:
    """Whether to let an edit in.

    An idle server refuses nobody on doubt: not for the objective at all, and for a timeout only what would miss it even
    if the prediction is far too long.
    """
    likely = outlook.seconds * margin.high
    if terms.timeout is not None:
        if outlook.alone * CERTAIN > terms.timeout:
            return Verdict("hopeless")
        if not outlook.is_idle and likely > terms.timeout:
            return Verdict("timeout", likely - terms.timeout)
    if terms.slo is None or likely <= terms.slo:
        return Verdict(has_objective=terms.slo is not None)
    if outlook.is_idle:
        return Verdict()
    is_too_large = outlook.alone * margin.high > terms.slo  # it will be served once the server is idle
    return Verdict("slo", outlook.seconds - outlook.alone if is_too_large else likely - terms.slo)

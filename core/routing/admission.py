"""Admission: decides whether an edit can be done in time, before any work is done for it.

An edit should finish within its own `timeout` (hard: its client is gone by then) and within the server's objective,
`--slo-ms` (soft: a late result is still worth something). `PredictionMargin` says how far predictions may be off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.costs.prediction_margin import CERTAIN, PredictionMargin

RefusedFor = Literal["slo", "timeout", "hopeless"]
"""slo, timeout: under the current load it would miss the objective, or its own timeout. hopeless: it would miss its
timeout even on an idle server.
"""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The prediction for an edit."""

    seconds: float  # from now until its pictures are finished
    alone: float  # the same on an idle server
    is_idle: bool  # the engine that it would go to has no other work
    starts_load: bool = False  # its model's weights are on no engine, and it would be the first to ask for them


@dataclass(frozen=True, slots=True)
class Terms:
    """Time limits of an edit, in seconds from now; None = no limit."""

    timeout: float | None  # its own
    slo: float | None  # the server's latency objective


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on an edit."""

    refused: RefusedFor | None = None  # the reason; None = admitted
    retry_after: float = 0.0  # seconds until an edit like it is predicted to be admitted
    has_objective: bool = False  # admitted because it will meet the objective; to be dropped once it cannot any more


def judge(outlook: Outlook, terms: Terms, margin: PredictionMargin, *, gives_up: bool = False) -> Verdict:
    """Decide whether to admit an edit. gives_up: whether the engines' policy decides which ones are too late. Then all
    are admitted that are not hopeless: it may serve one that comes later first, and predicts more exactly. One that
    may miss the objective even alone, by the margin, has none on an idle server, as no policy would serve it.

    An idle server never refuses because of the objective, and because of a timeout only if that would be missed even
    with a prediction that is far too long. Nor does a server refuse the first edit of a model that is not loaded:
    if all were refused, it would never be loaded.
    """
    likely = outlook.seconds * margin.high
    if terms.timeout is not None and outlook.alone * CERTAIN > terms.timeout:
        return Verdict("hopeless")
    if gives_up:
        cannot_be_met = outlook.is_idle and terms.slo is not None and outlook.alone * margin.high > terms.slo
        return Verdict(has_objective=terms.slo is not None and not cannot_be_met)
    never_refused = outlook.is_idle or outlook.starts_load
    if terms.timeout is not None and not never_refused and likely > terms.timeout:
        return Verdict("timeout", likely - terms.timeout)
    if terms.slo is None or likely <= terms.slo:
        return Verdict(has_objective=terms.slo is not None)
    if never_refused:
        return Verdict()
    is_too_large = outlook.alone * margin.high > terms.slo  # only an idle server will admit it
    return Verdict("slo", outlook.seconds - outlook.alone if is_too_large else likely - terms.slo)

"""Admission: decides whether an edit can be done in time, before any work is done for it.

An edit should finish within its own `timeout` (hard: its client is gone by then) and within the server's objective,
`--slo-ms` (soft: a late result is still worth something). `PredictionMargin` says how far predictions may be off. Which
of the admitted edits are too late is decided by the engines' scheduling policy, which may serve one that comes later
first.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.costs.prediction_margin import CERTAIN, PredictionMargin


@dataclass(frozen=True, slots=True)
class Outlook:
    """The prediction for an edit."""

    seconds: float  # from now until its pictures are finished
    alone: float  # the same on an idle server
    is_idle: bool  # the engine that it would go to has no other work


@dataclass(frozen=True, slots=True)
class Terms:
    """Time limits of an edit, in seconds from now; None = no limit."""

    timeout: float | None  # its own
    slo: float | None  # the server's latency objective


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on an edit."""

    is_hopeless: bool = False  # it would miss its timeout even on an idle server, and is refused
    has_objective: bool = False  # it can meet the objective; it may be dropped once it cannot any more


def judge(outlook: Outlook, terms: Terms, margin: PredictionMargin) -> Verdict:
    """Decide whether to admit an edit. An idle server refuses it only if its timeout would be missed even with a
    prediction that is far too long. There an edit that may miss the objective even alone, by the margin, has none.
    """
    if terms.timeout is not None and outlook.alone * CERTAIN > terms.timeout:
        return Verdict(is_hopeless=True)
    cannot_be_met = outlook.is_idle and terms.slo is not None and outlook.alone * margin.high > terms.slo
    return Verdict(has_objective=terms.slo is not None and not cannot_be_met)

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
    starts_load: bool = False  # its model's weights are on no engine, and it would be the first to ask for them


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
    """Decide whether to admit an edit. It is refused only if its timeout would be missed on an idle server even with a
    prediction that is far too long. On an idle server an edit that may miss the objective, by the margin, has none, and
    so has the first of a model that is not loaded: it is served however late.
    """
    if terms.timeout is not None and outlook.alone * CERTAIN > terms.timeout:
        return Verdict(is_hopeless=True)
    if terms.slo is None:
        return Verdict()
    may_be_late = outlook.seconds * margin.high > terms.slo
    return Verdict(has_objective=not (may_be_late and (outlook.is_idle or outlook.starts_load)))

"""Decides from the loads of an engine's requests which of them stay ahead of a new one in the engine's queue."""

from __future__ import annotations

from collections.abc import Sequence

from core.config import CLASS_SECONDS
from core.costs.load_report import RequestLoad


def staying_ahead(loads: Sequence[RequestLoad], owner: str, priority: int, now: float) -> list[int]:
    """Indices of the loads that go before a new request of this owner and class. loads: in queue order.

    The new request overtakes its own owner's waiting requests of lower classes, unless they have waited long, and of
    every other owner what comes after as much work as its own owner has waiting. Loads have no virtual times
    (`core.scheduling.requests.fair_queue`), so all owners are assumed to have had equal shares so far.
    """
    stays = [load.is_running or not _is_overtaken(load, priority, now) for load in loads]
    own = sum(
        load.seconds
        for load, is_ahead in zip(loads, stays, strict=True)
        if is_ahead and load.owner == owner and not load.is_running
    )
    limit = own + CLASS_SECONDS * priority
    ahead: dict[str, float] = {}  # other owner -> seconds of its waiting work so far
    for index, load in enumerate(loads):
        if load.owner != owner and not load.is_running:
            spent = ahead.get(load.owner, 0.0)
            ahead[load.owner] = spent + load.seconds
            stays[index] = spent + CLASS_SECONDS * load.priority <= limit
    return [index for index, is_ahead in enumerate(stays) if is_ahead]


def _is_overtaken(load: RequestLoad, priority: int, now: float) -> bool:
    """Whether a new request of this class overtakes a waiting one of the same owner."""
    classes = load.priority - priority
    return classes > 0 and now - load.arrival < CLASS_SECONDS * classes

"""Which requests a newcomer overtakes in an engine's queue, as far as its load report tells."""

from __future__ import annotations

from collections.abc import Sequence

from core.config import CLASS_SECONDS
from core.costs.load_report import RequestLoad


def staying_ahead(loads: Sequence[RequestLoad], owner: str, priority: int, now: float) -> list[int]:
    """Indices of the loads, given first what goes first, that go before a request of this owner and class.

    Of its own owner's, those that wait in lower classes and have not waited for long give way. Of another owner's, what
    comes after as much work as its own owner has waiting: the report tells no virtual times (`core.scheduling.fair_queue`), so
    every owner counts as having got the same so far.
    """
    stays = [load.is_running or not _gives_way(load, priority, now) for load in loads]
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


def _gives_way(load: RequestLoad, priority: int, now: float) -> bool:
    """Whether a waiting request of the same owner lets one of this class go first that comes now."""
    classes = load.priority - priority
    return classes > 0 and now - load.arrival < CLASS_SECONDS * classes

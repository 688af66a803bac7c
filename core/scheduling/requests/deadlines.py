"""When requests are due, and why they end early.

A request may have a deadline of its own (`timeout`; after it the result is useless), the server's latency objective
(`--slo-ms`), or both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from core.config import PATIENCE_SECONDS
from core.errors import DeadlineExceededError
from core.failure import Failure
from core.messages.engine import EngineRequest
from core.scheduling.requests.fair_queue import Urgency, counts_as_due
from core.scheduling.requests.request import Request

PASSED = Failure.of(DeadlineExceededError("The request's timeout passed before it finished."))
TOO_LATE = Failure.of(DeadlineExceededError("The request was given up: it could not finish before its timeout."))
MISSED = Failure("overloaded", "The server fell behind: the request would have missed the latency objective.")


def due(head: EngineRequest) -> float | None:
    """The due time of a request, in monotonic seconds: the earlier of deadline and objective. None: it has neither."""
    return min((time for time in (head.deadline, head.objective) if time is not None), default=None)


def urgency(request: Request) -> Urgency:
    """Sort key among one owner's requests: priority and due time, arrival, and id, which makes the order total."""
    head = request.head
    return counts_as_due(head.arrival, due(head), head.priority), head.arrival, head.request_id


def must_be_served(head: EngineRequest, now: float) -> bool:
    """Whether a request that is late or has no due time has waited so long that it is served although others become
    late. now: monotonic seconds.
    """
    return now - head.arrival > PATIENCE_SECONDS * (1 + head.priority)


def passed(requests: Iterable[Request], now: float) -> Iterator[Request]:
    """Those of these requests whose timeout has passed: their results are useless. now: monotonic seconds."""
    return (each for each in requests if each.head.deadline is not None and each.head.deadline <= now)


def why_late(head: EngineRequest, end: float) -> Failure | None:
    """Why to give up a request that delays others and is predicted to finish at `end`; None if it would be in time."""
    if head.deadline is not None and end > head.deadline:
        return TOO_LATE
    return MISSED if head.objective is not None and end > head.objective else None

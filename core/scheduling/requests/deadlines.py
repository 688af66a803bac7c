"""Deadlines: decides which requests can no longer finish in time, and which may join a batch without making another
request late.

A request may have a deadline of its own (`timeout`; after it the result is useless), the server's latency objective
(`--slo-ms`), or both. Pure: times are arguments, and a request's remaining work is given as its RequestLoad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from core.costs.batch_forecast import BatchForecast, Member
from core.costs.load_report import RequestLoad
from core.costs.prediction_margin import CERTAIN
from core.costs.slot_forecast import SlotForecast, alone
from core.errors import DeadlineExceededError
from core.failure import Failure
from core.messages.engine import EngineRequest
from core.scheduling.requests.bindings import Needs
from core.scheduling.requests.fair_queue import Urgency, counts_as_due
from core.scheduling.requests.request import Request, Status

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


MayJoin = Callable[[Request], bool]
"""Whether a request may join the running batch."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Decides which requests to give up and which may join, from predictions of their remaining work."""

    max_num_seqs: int
    remaining_load: Callable[[Request], RequestLoad]  # a request's remaining work
    base_seconds: Callable[[Sequence[Request]], float]  # the constant part of a step with these requests
    load_seconds: Callable[[Needs], float] = lambda needs: 0.0  # until these are loaded

    def too_late(self, requests: Sequence[Request], now: float) -> Iterator[tuple[Request, Failure]]:
        """The requests to give up, with the reason. requests: all live ones, the most urgent first.

        A running request is given up when its timeout has passed or is certain to pass; its objective is ignored. A
        waiting request is given up if it would be late even in the next free slot, once its model is loaded; only the
        max_num_seqs most urgent ones are predicted. While no request runs, a waiting one, too, is given up only when
        its timeout is certain to pass.
        """
        base = self.base_seconds(requests)
        running = [request for request in requests if request.status is Status.RUNNING]
        waiting = [request for request in requests if request.status is Status.WAITING]
        staying: list[RequestLoad] = []
        for request in running:
            load = self.remaining_load(request)
            failure = _why_stop(request.head, now, now + CERTAIN * alone(load, base))
            if failure is None:
                staying.append(load)
            else:
                yield request, failure
        yield from self._waiting_too_late(waiting, staying, base, now)

    def _waiting_too_late(
        self, waiting: Sequence[Request], running: Sequence[RequestLoad], base: float, now: float
    ) -> Iterator[tuple[Request, Failure]]:
        slot_forecast = SlotForecast(running, self.max_num_seqs, base)
        num_looked_at = 0
        for request in waiting:
            head = request.head
            if due(head) is None:
                continue
            if head.deadline is not None and head.deadline <= now:
                yield request, PASSED
            elif num_looked_at < self.max_num_seqs:
                num_looked_at += 1
                loaded = self.load_seconds(request.needs)
                seconds = slot_forecast.seconds(self.remaining_load(request), loaded)
                failure = why_late(head, now + seconds) if running else _why_stop(head, now, now + CERTAIN * seconds)
                if failure is not None:
                    yield request, failure

    def joining(self, requests: Sequence[Request], now: float) -> MayJoin:
        """A predicate: whether a request may join the running ones and those that the predicate has accepted before."""
        running = (request for request in requests if request.status is Status.RUNNING and request.progress.steps_left)
        forecast = BatchForecast((self._member(request, now) for request in running), self.base_seconds(requests))
        return lambda request: forecast.admit(self._member(request, now))

    def _member(self, request: Request, now: float) -> Member:
        time = due(request.head)
        return Member(self.remaining_load(request), None if time is None else time - now)


def _why_stop(head: EngineRequest, now: float, end: float) -> Failure | None:
    """Why to stop a request that is useful until its timeout; None: go on. end: its earliest finish time."""
    if head.deadline is None or end <= head.deadline:
        return None
    return PASSED if head.deadline <= now else TOO_LATE


def why_late(head: EngineRequest, end: float) -> Failure | None:
    """Why to give up a request that delays others and is predicted to finish at `end`; None if it would be in time."""
    if head.deadline is not None and end > head.deadline:
        return TOO_LATE
    return MISSED if head.objective is not None and end > head.objective else None

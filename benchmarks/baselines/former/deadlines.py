"""Deadlines: decides which requests can no longer finish in time, and which may join a batch without making another
request late.

A request may have a deadline of its own (`timeout`; after it the result is useless), the server's latency objective
(`--slo-ms`), or both. Pure: times are arguments, and a request's remaining work is given as its RemainingLoad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.baselines.former.batch_forecast import BatchForecast, Member
from benchmarks.baselines.former.remaining_loads import RemainingLoad
from benchmarks.baselines.former.slot_forecast import SlotForecast, alone
from core.costs.prediction_margin import CERTAIN
from core.failure import Failure
from core.messages.engine import EngineRequest
from core.scheduling.requests.bindings import Needs
from core.scheduling.requests.deadlines import PASSED, TOO_LATE, due, why_late
from core.scheduling.requests.request import Request, Status

MayJoin = Callable[[Request], bool]
"""Whether a request may join the running batch."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Decides which requests to give up and which may join, from predictions of their remaining work."""

    max_num_seqs: int
    remaining_load: Callable[[Request], RemainingLoad]  # a request's remaining work
    base_seconds: Callable[[Sequence[Request]], float]  # the constant part of a step with these requests
    load_seconds: Callable[[Needs], float]  # until these are loaded

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
        staying: list[RemainingLoad] = []
        for request in running:
            load = self.remaining_load(request)
            failure = _why_stop(request.head, now, now + CERTAIN * alone(load, base))
            if failure is None:
                staying.append(load)
            else:
                yield request, failure
        yield from self._waiting_too_late(waiting, staying, base, now)

    def _waiting_too_late(
        self, waiting: Sequence[Request], running: Sequence[RemainingLoad], base: float, now: float
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

"""Deadlines: who goes first, who can no longer be done in time, and who may join a batch without making others late.

A request has a deadline of its own (`timeout`), after which nobody wants it, or an objective of the server's
(`--slo-ms`), or both. Pure: times are arguments, and what is left of a request comes as its RequestLoad.
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
from core.messages.engine import EditRequest
from core.scheduling.fair_queue import Urgency, counts_as_due
from core.scheduling.request import Request, Status

PASSED = Failure.of(DeadlineExceededError("The request's timeout passed before it finished."))
TOO_LATE = Failure.of(DeadlineExceededError("The request was given up: it could not finish before its timeout."))
MISSED = Failure("overloaded", "The server fell behind: the request would have missed the latency objective.")


def due(edit: EditRequest) -> float | None:
    """When it is to be done; None = whenever."""
    return min((time for time in (edit.deadline, edit.objective) if time is not None), default=None)


def urgency(request: Request) -> Urgency:
    """Sort key among the requests of one owner: priority and when it is due, then arrival; the id makes it total."""
    edit = request.edit
    return counts_as_due(edit.arrival, due(edit), edit.sampling.priority), edit.arrival, edit.request_id


MayJoin = Callable[[Request], bool]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """left: what is left of a request. base_seconds: what a step of these takes whoever is in it."""

    max_num_seqs: int
    left: Callable[[Request], RequestLoad]
    base_seconds: Callable[[Sequence[Request]], float]

    def lost(self, requests: Sequence[Request], now: float) -> Iterator[tuple[Request, Failure]]:
        """Live requests, given most urgent first, that are to be given up, and why.

        One that runs is lost when nobody can want its result any more: its objective does not count. One that waits is
        lost if it would be late even with the next free place; only those are looked at that could have it soon. While
        nobody runs, doubt is no reason: it is lost only when its timeout is sure to pass.
        """
        if not _any_due(requests):
            return
        base = self.base_seconds(requests)
        running = [request for request in requests if request.status is Status.RUNNING]
        waiting = [request for request in requests if request.status is Status.WAITING]
        staying: list[RequestLoad] = []
        for request in running:
            load = self.left(request)
            failure = _why_stop(request.edit, now, now + CERTAIN * alone(load, base))
            if failure is None:
                staying.append(load)
            else:
                yield request, failure
        yield from self._lost_waiting(waiting, staying, base, now)

    def _lost_waiting(
        self, waiting: Sequence[Request], running: Sequence[RequestLoad], base: float, now: float
    ) -> Iterator[tuple[Request, Failure]]:
        slot_forecast = SlotForecast(running, self.max_num_seqs, base)
        num_looked_at = 0
        for request in waiting:
            edit = request.edit
            if due(edit) is None:
                continue
            if edit.deadline is not None and edit.deadline <= now:
                yield request, PASSED
            elif num_looked_at < self.max_num_seqs:
                num_looked_at += 1
                seconds = slot_forecast.seconds(self.left(request))
                failure = _why_drop(edit, now + seconds) if running else _why_stop(edit, now, now + CERTAIN * seconds)
                if failure is not None:
                    yield request, failure

    def joining(self, requests: Sequence[Request], now: float) -> MayJoin | None:
        """Whether a request may join those that make steps now, and those that it was asked of before; None where
        nobody could be late for anybody else.
        """
        if not _any_due(requests):
            return None
        running = (request for request in requests if request.status is Status.RUNNING and request.progress.steps_left)
        forecast = BatchForecast((self._member(request, now) for request in running), self.base_seconds(requests))
        return lambda request: forecast.admit(self._member(request, now))

    def _member(self, request: Request, now: float) -> Member:
        time = due(request.edit)
        return Member(self.left(request), None if time is None else time - now)


def _why_stop(edit: EditRequest, now: float, end: float) -> Failure | None:
    """Why to give up what is worth finishing until its timeout passes, which could end at `end` with luck."""
    if edit.deadline is None or end <= edit.deadline:
        return None
    return PASSED if edit.deadline <= now else TOO_LATE


def _why_drop(edit: EditRequest, end: float) -> Failure | None:
    """Why to give up what is in others' way, if it is done at `end`."""
    if edit.deadline is not None and end > edit.deadline:
        return TOO_LATE
    return MISSED if edit.objective is not None and end > edit.objective else None


def _any_due(requests: Sequence[Request]) -> bool:
    return any(due(request.edit) is not None for request in requests)

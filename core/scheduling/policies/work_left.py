"""WorkLeft: what requests have left to do before, in and after their steps, in predicted seconds."""

from __future__ import annotations

from typing import NamedTuple

from core.graph.op import Op
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

FORGET_EVERY = 64
"""Passes after which all predictions are made again, so that what batches have taken meanwhile is reckoned with."""


class Left(NamedTuple):
    """What one request has left to do."""

    steps: int
    tokens: float  # computed by one of these steps, the mean over them; of all rows
    keys: float  # that these attend to, likewise
    before: float  # seconds of nodes that run once, before the last steps
    after: float  # seconds of nodes that read what rounds have made
    alone: float  # seconds of all of it, with no other request


class WorkLeft:
    """Predictions are kept for some passes: there are few different ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, Work], float] = {}
        self._waiting: dict[str, Left] = {}  # request id -> what it has left: all, while it waits
        self._passes = 0
        self._now = 0.0

    def next_pass(self, now: float) -> bool:
        """Note that a pass begins, unless it is asked for once more; whether predictions are made again from now on."""
        self._passes += now != self._now
        self._now = now
        if self._passes < FORGET_EVERY:
            return False
        self._passes = 0
        self._known.clear()
        self._waiting.clear()
        return True

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._waiting.pop(request_id, None)

    def of(self, view: View, request: Request) -> Left:
        """What is not sent yet. Queues may be long, and are asked for often."""
        if request.status is not Status.WAITING:
            self._waiting.pop(request.id, None)
            return self._of(view, request)
        left = self._waiting.get(request.id)
        if left is None:
            left = self._of(view, request)
            self._waiting[request.id] = left
        return left

    def _of(self, view: View, request: Request) -> Left:
        before, after = self._others(view, request)
        steps, seconds, tokens, keys = 0, 0.0, 0, 0
        for node in request.workflow.steps:
            for times, work in steps_of(request, node):
                steps += times
                seconds += times * self._seconds(view, request.head.model, op_of(node), work)
                tokens += times * sum(work.queries)
                keys += times * sum(work.keys)
        mean = max(steps, 1)
        return Left(steps, tokens / mean, keys / mean, before, after, before + seconds + after)

    def seconds(self, view: View, model: str, op: Op, work: Work, times: int = 1) -> float:
        """Predicted time of a batch of several items, each of this work."""
        return self._seconds(view, model, op, Work(work.queries * times, work.keys * times))

    def alone(self, view: View, request: Request, node: Node) -> float:
        """Predicted time of running a node next, alone."""
        return self._seconds(view, request.head.model, op_of(node), request.work(node))

    def _others(self, view: View, request: Request) -> tuple[float, float]:
        before = after = 0.0
        workflow, progress = request.workflow, request.progress
        for node in workflow.nodes:
            if node.name in workflow.step_names or not (times := progress.times_left(node)):
                continue
            seconds = times * self.alone(view, request, node)
            if node.name in workflow.after_rounds:
                after += seconds
            else:
                before += seconds
        return before, after

    def _seconds(self, view: View, model: str, op: Op, work: Work) -> float:
        key = model, op.name, work
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = view.batch_seconds(model, op, work)
        return seconds


def steps_of(request: Request, node: Node) -> list[tuple[int, Work]]:
    """(number, work of one) of a node's steps that are left: those that compute all tokens, and mask-aware ones."""
    times, spec = request.progress.times_left(node), request.spec
    if not times:
        return []
    if node.canvas or not spec.is_mask_aware:
        return [(times, request.work(node))]
    first = request.progress.scheduled[node.name]
    num_full = spec.num_full_steps(first, first + times)
    kinds = (num_full, False), (times - num_full, True)
    return [(number, request.work_of(node, is_masked=is_masked)) for number, is_masked in kinds if number]

"""WorkEstimator: the work that requests have left before, in and after their steps, in predicted seconds."""

from __future__ import annotations

from typing import NamedTuple

from core.graph.op import Op
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

FORGET_EVERY = 64
"""Passes after which all predictions are made again, because the cost model has learnt from batches meanwhile."""


class RemainingWork(NamedTuple):
    """The work of one request that no rank has been sent yet."""

    steps: int
    tokens: float  # mean tokens that one of these steps computes, over all of its rows
    keys: float  # mean tokens that one of these steps attends to, over all of its rows
    before: float  # seconds of the nodes that run once, before the last steps
    after: float  # seconds of the nodes that read what rounds have made
    alone: float  # seconds of all of it, if no other request shares its batches


class WorkEstimator:
    """Keeps predictions for some passes, because many requests need the same few. One per policy."""

    def __init__(self) -> None:
        self._known: dict[tuple[ModelKeys, str, Work], float] = {}  # (components, op, work) -> seconds
        self._waiting: dict[str, RemainingWork] = {}  # id of a waiting request -> all of its work
        self._passes = 0
        self._now = 0.0

    def next_pass(self, now: float) -> bool:
        """Note that a pass begins; a second call with the same `now` belongs to the same pass. Returns whether all
        predictions are made again from now on.
        """
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

    def remaining(self, view: View, request: Request) -> RemainingWork:
        """The remaining work of a request. Kept while it waits, because queues may be long and every pass asks."""
        if request.status is not Status.WAITING:
            self._waiting.pop(request.id, None)
            return self._predict(view, request)
        remaining = self._waiting.get(request.id)
        if remaining is None:
            remaining = self._waiting[request.id] = self._predict(view, request)
        return remaining

    def _predict(self, view: View, request: Request) -> RemainingWork:
        before, after = self._other_seconds(view, request)
        steps, seconds, tokens, keys = 0, 0.0, 0, 0
        for node in request.workflow.steps:
            for times, work in steps_of(request, node):
                steps += times
                seconds += times * self.batch_seconds(view, request.keys_of(node), op_of(node), work)
                tokens += times * sum(work.queries)
                keys += times * sum(work.keys)
        mean = max(steps, 1)
        return RemainingWork(steps, tokens / mean, keys / mean, before, after, before + seconds + after)

    def batch_seconds(self, view: View, keys: ModelKeys, op: Op, work: Work, number: int = 1) -> float:
        """Predicted time of a batch of this number of items, each of this work."""
        key = keys, op.name, Work(work.queries * number, work.keys * number)
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = view.batch_seconds(keys, op, key[2])
        return seconds

    def _other_seconds(self, view: View, request: Request) -> tuple[float, float]:
        """(seconds before, seconds after) the steps."""
        before = after = 0.0
        workflow, progress = request.workflow, request.progress
        for node in workflow.nodes:
            if node.name in workflow.step_names or not (times := progress.times_left(node)):
                continue
            seconds = times * self.batch_seconds(view, request.keys_of(node), op_of(node), request.work(node))
            if node.name in workflow.after_rounds:
                after += seconds
            else:
                before += seconds
        return before, after


def steps_of(request: Request, node: Node) -> list[tuple[int, Work]]:
    """(number, work of one) of a node's remaining steps: first those that compute all tokens, then mask-aware ones."""
    times, spec = request.progress.times_left(node), request.spec
    if not times:
        return []
    if node.canvas or not spec.is_mask_aware:
        return [(times, request.work(node))]
    first = request.progress.scheduled[node.name]
    num_full = spec.num_full_steps(first, first + times)
    kinds = (num_full, False), (times - num_full, True)
    return [(number, request.work_of(node, is_masked=is_masked)) for number, is_masked in kinds if number]

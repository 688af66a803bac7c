"""Clockwork (OSDI 2020), as the authors of NeuStream compare with it: whole requests, batched when they are started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.deadlines import MISSED, due
from core.scheduling.dispatch import Decision, Dispatch, GiveUp
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.request import Request, Status
from core.scheduling.view import View


class Clockwork(SchedulingPolicy):
    """On the first rank. A batch of requests runs from its first op to its last with no other beside it. Of the batches
    that would be in time, that starts which has to start first; requests that would be late even alone are dropped.

    equal_steps: requests share a batch only if they have the same number of steps, as in the authors' program. Without
    it, one with fewer steps waits for the others of its batch.
    """

    gives_up = True

    def __init__(self, *, equal_steps: bool) -> None:
        self._equal_steps = equal_steps
        self._batch: list[Request] = []

    def on_end(self, request_id: str) -> None:
        self._batch = [request for request in self._batch if request.id != request_id]

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        given_up: list[Decision] = []
        if not self._batch:
            waiting = [request for request in view.requests.live() if request.status is Status.WAITING]
            late = [request for request in waiting if now + _seconds(view, [request]) > _due(request)]
            given_up = [GiveUp(request, MISSED) for request in late]
            in_time = [request for request in waiting if request not in late]
            self._batch = self._choose_batch(view, in_time, now) if view.ranks[0] in view.idle_ranks else []
        return [*given_up, *self._dispatches(view)]

    def _choose_batch(self, view: View, waiting: Sequence[Request], now: float) -> list[Request]:
        """The batch that has to start first; the larger one of equals."""
        groups: dict[tuple[int, ...], list[Request]] = {}
        for request in sorted(waiting, key=_due):
            groups.setdefault(request.head.rounds if self._equal_steps else (), []).append(request)
        batches = [batch for group in groups.values() if (batch := _largest(view, group, now))]
        return min(batches, key=lambda batch: (_start_by(view, batch), -len(batch)), default=[])

    def _dispatches(self, view: View) -> Iterator[Decision]:
        """The first op that any request of the batch waits for, for all that do: no request overtakes another."""
        ready = {node.name for request in self._batch for node in view.ready(request)}
        if not self._batch or view.ranks[0] not in view.idle_ranks:
            return
        node = next((node for node in self._batch[0].workflow.nodes if node.name in ready), None)
        if node is not None:
            items = tuple((request, node) for request in self._batch if node in view.ready(request))
            yield Dispatch(items, view.ranks[:1])


def _largest(view: View, group: Sequence[Request], now: float) -> list[Request]:
    """As many requests as can be in time together, those that are due first first."""
    most = _most(view, group[0])
    batch: list[Request] = []
    for request in group:
        grown = [*batch, request]
        end = now + _seconds(view, grown)
        if len(grown) <= most and all(end <= _due(each) for each in grown):
            batch = grown
    return batch


def _start_by(view: View, batch: Sequence[Request]) -> float:
    return min(_due(request) for request in batch) - _seconds(view, batch)


def _seconds(view: View, batch: Sequence[Request]) -> float:
    """All ops for all of them together, from the first one to the last."""
    head = batch[0]
    return sum(
        max(request.progress.times(node) for request in batch)
        * view.batch_seconds(head.head.model, op_of(node), _work(batch, node))
        for node in head.workflow.nodes
    )


def _work(batch: Sequence[Request], node: Node) -> Work:
    return sum((op_of(node).size(request.sizes(node)) for request in batch), Work((), ()))


def _most(view: View, request: Request) -> int:
    """The largest batch that all ops were profiled with."""
    sizes = (view.largest_batch(request.head.model, op_of(node)) for node in request.workflow.nodes)
    return min((size for size in sizes if size is not None), default=view.config.max_num_seqs)


def _due(request: Request) -> float:
    time = due(request.head)
    return inf if time is None else time

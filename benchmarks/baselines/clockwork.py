"""Clockwork (OSDI 2020), as the authors of NeuStream compare with it: whole requests, batched when they are started.

A policy for the simulation and for a server: `--scheduling-policy benchmarks.baselines.clockwork:Clockwork`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from benchmarks.baselines.former.step_batching import StepPass, eligible
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.dispatch import Decision, GiveUp
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.requests.deadlines import due, why_late
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View


class Clockwork(SchedulingPolicy):
    """All ranks are equal. On each, a batch of requests runs from its first op to its last with no other beside it. Of
    the batches that would be in time, that starts which has to start first; requests that would be late even alone are
    dropped.

    equal_steps: requests share a batch only if they have the same number of steps, as in the authors' program. Without
    it, one with fewer steps waits for the others of its batch. num_ranks: those that it uses, from the first one on;
    None: all.
    """

    spreads_models = False

    def __init__(self, *, equal_steps: bool = False, num_ranks: int | None = None) -> None:
        self._equal_steps = equal_steps
        self._num_ranks = num_ranks
        self._batches: dict[int, list[Request]] = {}  # rank -> its batch, those that have not ended

    def on_end(self, request_id: str) -> None:
        for rank, batch in self._batches.items():
            self._batches[rank] = [request for request in batch if request.id != request_id]

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        given_up = list[GiveUp]()
        ranks = view.ranks[: self._num_ranks]
        free = [rank for rank in ranks if not self._batches.get(rank) and rank in view.idle_ranks]
        if free:
            taken = {request.id for batch in self._batches.values() for request in batch}
            waiting = [each for each in eligible(view) if each.status is Status.WAITING and each.id not in taken]
            given_up = list(_late(view, waiting, now))
            gone = {each.request.id for each in given_up}
            in_time = [request for request in waiting if request.id not in gone]
            for rank in free:
                batch = self._batches[rank] = self._choose_batch(view, in_time, now)
                in_time = [request for request in in_time if request not in batch]
        return [*given_up, *ClockworkPass(view, batches=self._batches).run()]

    def _choose_batch(self, view: View, waiting: Sequence[Request], now: float) -> list[Request]:
        """The batch that has to start first; the larger one of equals."""
        groups: dict[tuple[str, str, tuple[int, ...]], list[Request]] = {}
        for request in sorted(waiting, key=_due):
            rounds = request.head.rounds if self._equal_steps else ()
            groups.setdefault((request.head.model, request.head.workflow, rounds), []).append(request)
        batches = [batch for group in groups.values() if (batch := _largest(view, group, now))]
        return min(batches, key=lambda batch: (_start_by(view, batch), -len(batch)), default=[])


@dataclass(slots=True)
class ClockworkPass(StepPass):
    """One pass: the next op of every rank's batch, and what the activation cache has to do for it."""

    batches: Mapping[int, Sequence[Request]] = field(default_factory=dict)  # rank -> its batch

    def run(self) -> list[Decision]:
        self._jobs = self.view.jobs()
        self._candidates = [each for batch in self.batches.values() for each in self._next_op(batch)]
        self._choose_waited_for_pieces()
        tokens = 0
        for batch in self.batches.values():
            items = [(request, node) for request, nodes in self._next_op(batch) for node in nodes]
            if items and all(self._can_run(request, node) for request, node in items):
                self._add(items)
                tokens += sum(request.sizes(node).num_step_tokens for request, node in items)
        self._choose_cache_work({self.view.ranks[0]: tokens})
        return [*self._fetches(), *(self._decision(key) for key in self._order)]

    def _next_op(self, batch: Sequence[Request]) -> list[tuple[Request, list[Node]]]:
        """The first op that any request of a batch waits for, for all that do: no request overtakes another."""
        ready = {node.name for request in batch for node in self.view.ready(request)}
        name = next((node.name for node in batch[0].workflow.nodes if node.name in ready), "") if ready else ""
        return [(each, [node for node in self.view.ready(each) if node.name == name]) for each in batch if ready]

    def _rank(self, request: Request, node: Node) -> int:
        return next(rank for rank, batch in self.batches.items() if request in batch)


def _late(view: View, waiting: Sequence[Request], now: float) -> Iterator[GiveUp]:
    for request in waiting:
        failure = why_late(request.head, now + _seconds(view, [request]))
        if failure is not None:
            yield GiveUp(request, failure)


def _largest(view: View, group: Sequence[Request], now: float) -> list[Request]:
    """As many requests as can be in time together, those that are due first first."""
    most = _most(view, group[0])
    batch: list[Request] = []
    for request in group:
        if len(batch) == most:
            break
        grown = [*batch, request]
        end = now + _seconds(view, grown)
        if all(end <= _due(each) for each in grown):
            batch = grown
    return batch


def _start_by(view: View, batch: Sequence[Request]) -> float:
    return min(_due(request) for request in batch) - _seconds(view, batch)


def _seconds(view: View, batch: Sequence[Request]) -> float:
    """All ops for all of them together, from the first one to the last."""
    nodes = batch[0].workflow.nodes
    return sum(_node_seconds(view, batch, node) for node in nodes)


def _node_seconds(view: View, batch: Sequence[Request], node: Node) -> float:
    """All runs of a node. Steps of all tokens come before the mask-aware ones, as many as of the request that has most
    of them.
    """
    keys, op = batch[0].keys_of(node), op_of(node)
    if node.name not in batch[0].workflow.step_names:
        work = sum((op.size(request.sizes(node)) for request in batch), Work((), ()))
        return max(request.progress.times(node) for request in batch) * view.batch_seconds(keys, op, work)
    kinds = [request.steps_left(node) for request in batch]
    seconds = 0.0
    for place in range(max(map(len, kinds))):
        own = [of[min(place, len(of) - 1)] for of in kinds]
        work = sum((each for _, each in own), Work((), ()))
        seconds += max(times for times, _ in own) * view.batch_seconds(keys, op, work)
    return seconds


def _most(view: View, request: Request) -> int:
    """The largest batch that all ops were profiled with, but for those that were profiled alone: they run their items
    one after the other; `max_num_seqs` at most.
    """
    most = view.config.max_num_seqs
    sizes = (view.largest_batch(request.keys_of(node), op_of(node)) for node in request.workflow.nodes)
    rows = [size for size in sizes if size is not None and size > 1]
    return max(1, min(most, min(rows) // request.spec.num_rows)) if rows else most


def _due(request: Request) -> float:
    time = due(request.head)
    return inf if time is None else time

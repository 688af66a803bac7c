"""neustream: module-level batches, limited by each op's share of the objective (NeuStream, EuroSys 2025, section 4.1).

A baseline to compare with; `goodput` serves more. Every op takes what came first, up to its batch limit: the largest
batch whose latency is within the op's share of the objective, its partial SLO (Algorithm 1). Where ops share a rank,
that batch goes first which would end first if each had its share of the rank (section 5; `turns.py`).

Taken literally, the paper's budget drops every request that waits at its first op, as no partial SLO has been granted
before. The authors' published program drops a request when what is left of its objective is less than what it has left
to do at batch 1 and TRANSFER_SECONDS; so does this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from core.costs.latency_table import largest_batch
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.dispatch import Decision, GiveUp
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.policies.step_batching import StepPass, eligible
from core.scheduling.policies.turns import Turns
from core.scheduling.policies.work_left import WorkLeft
from core.scheduling.requests.deadlines import due, why_late
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

TRANSFER_SECONDS = 0.035
"""Time that the authors' program reserves for the way between two ops."""

SHARE = 0.95
"""Part of a partial SLO that a batch may take, in the same program."""


class Alone(NamedTuple):
    """Predicted seconds of a request at batch 1."""

    before: float  # of nodes that run once, before the last steps
    step: float  # of a step, the mean
    after: float  # of nodes that read what rounds have made
    stretch: float  # its objective, as a multiple of all of its time; inf: it has no due time

    def left(self, request: Request) -> float:
        """Of what is not sent yet."""
        before = self.before if request.status is Status.WAITING else 0.0
        return before + request.progress.steps_left * self.step + self.after


class NeuStream(SchedulingPolicy):
    """Keeps what requests take alone."""

    gives_up = True

    def __init__(self) -> None:
        self._work = WorkLeft()
        self._turns = Turns()
        self._alone: dict[str, Alone] = {}  # request id -> predicted when it was first seen

    def on_end(self, request_id: str) -> None:
        self._alone.pop(request_id, None)
        self._work.forget(request_id)

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        self._work.next_pass(now)
        streams = sorted(eligible(view), key=lambda request: (request.head.arrival, request.id))
        late = [each for request in streams if (each := self._late(view, request, now)) is not None]
        gone = {each.request.id for each in late}
        stays = [request for request in streams if request.id not in gone]
        useless = [each for each in late if view.config.on_late == "drop" or _is_useless(each.request, now)]
        dropped = {each.request.id for each in useless}
        stays += [each.request for each in late if each.request.id not in dropped]
        batches = NeuStreamPass(view, stays=stays, alone=self._alone, work=self._work).run()
        return [*useless, *self._turns.choose(view, batches, now)]

    def _late(self, view: View, request: Request, now: float) -> GiveUp | None:
        """The request, if its budget is spent."""
        alone = self._alone.get(request.id)
        if alone is None:
            alone = self._alone[request.id] = self._predict(view, request)
        time = due(request.head)
        if time is None:
            return None
        is_in_steps = request.progress.steps_left > 0
        seconds = alone.left(request) + TRANSFER_SECONDS if is_in_steps else self._work.of(view, request).after
        end = now + seconds
        failure = why_late(request.head, end)
        return None if failure is None else GiveUp(request, failure)

    def _predict(self, view: View, request: Request) -> Alone:
        left, time = self._work.of(view, request), due(request.head)
        step = (left.alone - left.before - left.after) / max(1, left.steps)
        stretch = (time - request.head.arrival) / left.alone if time is not None and left.alone else inf
        return Alone(left.before, step, left.after, stretch)


def _is_useless(request: Request, now: float) -> bool:
    return request.head.deadline is not None and request.head.deadline <= now


@dataclass(slots=True)
class NeuStreamPass(StepPass):
    """One pass: of every op one batch, in the order of arrival; `Turns` chooses between them."""

    stays: Sequence[Request] = ()
    alone: Mapping[str, Alone] = field(default_factory=dict)
    work: WorkLeft = field(default_factory=WorkLeft)
    _limits: dict[tuple[str, Work, float], int] = field(
        default_factory=dict
    )  # (op, work, stretch) of a request -> limit

    def _admit(self) -> list[Request]:
        return list(self.stays)

    def _rank(self, request: Request, node: Node) -> int:
        return self._rank_apart(request, node)

    def _choose_nodes(self, request: Request, nodes: Sequence[Node]) -> None:
        for node in nodes:
            key = request.head.model, node.op, self._ranks_of(request, node)
            if len(self._batches.get(key, ())) < self._limit(request, node):
                self._add([(request, node)])

    def _choose_step(self) -> int:
        """Choose up to the op's batch limit in one batch per model, op and rank; returns the tokens."""
        tokens = 0
        for request, node in self._ready_steps():
            sizes = request.sizes(node)
            size = sizes.num_step_tokens * sizes.num_rows
            chosen = self._batches.get((request.head.model, node.op, self._ranks_of(request, node)), ())
            if len(chosen) < self._limit(request, node) and (not chosen or tokens + size <= self.view.max_step_tokens):
                self._add([(request, node)])
                tokens += size
        return tokens

    def _limit(self, request: Request, node: Node) -> int:
        """Largest batch within the request's partial SLO for this op; 1 if none is."""
        op, model = op_of(node), request.head.model
        work = request.work(node)
        key = node.op, work, self.alone[request.id].stretch
        limit = self._limits.get(key)
        if limit is None:
            share = SHARE * key[2] * self.work.seconds(self.view, model, op, work)
            most = self.view.largest_batch(model, op)
            number = self.view.config.max_num_seqs if most is None else max(1, most // len(work.queries))
            limit = largest_batch(lambda times: self.work.seconds(self.view, model, op, work, times), share, number)
            limit = self._limits[key] = max(1, limit)
        return limit

"""neustream: module-level batches, limited by each op's share of the objective (NeuStream, EuroSys 2025, section 4.1).

A baseline to compare with; `default` serves more. Every op takes the requests that came first, up to its batch limit:
the largest batch whose latency is within the op's share of the objective, its partial SLO (Algorithm 1). Where ops
share a rank, the batch goes first that would end first if each op had its share of the rank (section 5;
`earliest_finish.py`).

Taken literally, the paper's budget drops every request that waits at its first op, because no partial SLO has been
granted before. The authors' published program drops a request when the time until its objective is shorter than its
remaining work at batch 1 and TRANSFER_SECONDS together. This policy follows the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

from core.costs.latency_table import largest_batch
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.dispatch import Decision, GiveUp
from core.scheduling.policies.papers.earliest_finish import EarliestFinish
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.policies.step_pass import StepPass, eligible
from core.scheduling.requests.deadlines import due, why_late
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View

TRANSFER_SECONDS = 0.035
"""Time that the authors' program reserves for sending a request from one op to the next."""

SHARE = 0.95
"""Part of a partial SLO that a batch may take in the authors' program."""


class LatencyAlone(NamedTuple):
    """Predicted seconds of a request at batch 1."""

    before: float  # of the nodes that run once, before the last steps
    step: float  # of a step, the mean over its steps
    after: float  # of the nodes that read what rounds have made
    stretch: float  # its objective, as a multiple of all of this time; inf: it has no due time

    def remaining(self, request: Request) -> float:
        """Seconds of the work that is not sent yet."""
        before = self.before if request.status is Status.WAITING else 0.0
        return before + request.progress.steps_left * self.step + self.after


class NeuStream(SchedulingPolicy):
    """Keeps the latency of every live request alone."""

    def __init__(self) -> None:
        self._earliest_finish = EarliestFinish()
        self._alone: dict[str, LatencyAlone] = {}  # request id -> predicted when it was first seen

    def on_end(self, request_id: str) -> None:
        self._alone.pop(request_id, None)

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        requests = sorted(eligible(view), key=lambda request: (request.head.arrival, request.id))
        late = [each for request in requests if (each := self._late(view, request, now)) is not None]
        late_ids = {each.request.id for each in late}
        served = [request for request in requests if request.id not in late_ids]
        given_up = [each for each in late if view.config.on_late == "drop" or _is_useless(each.request, now)]
        dropped = {each.request.id for each in given_up}
        served += [each.request for each in late if each.request.id not in dropped]  # after all others
        batches = NeuStreamPass(view, served=served, alone=self._alone).run()
        return [*given_up, *self._earliest_finish.choose(view, batches, now)]

    def _late(self, view: View, request: Request, now: float) -> GiveUp | None:
        """The decision that gives up a request whose budget is spent; None for any other request."""
        alone = self._alone.get(request.id)
        if alone is None:
            alone = self._alone[request.id] = self._predict(view, request)
        time = due(request.head)
        if time is None:
            return None
        if request.progress.steps_left:
            end = now + (alone.remaining(request) + TRANSFER_SECONDS)
        else:
            end = now + view.work_left(request).after
        failure = why_late(request.head, end)
        return None if failure is None else GiveUp(request, failure)

    def _predict(self, view: View, request: Request) -> LatencyAlone:
        work, time = view.work_left(request), due(request.head)
        step = (work.alone - work.before - work.after) / max(1, work.steps)
        stretch = (time - request.head.arrival) / work.alone if time is not None and work.alone else inf
        return LatencyAlone(work.before, step, work.after, stretch)


def _is_useless(request: Request, now: float) -> bool:
    """Whether its timeout has passed."""
    return request.head.deadline is not None and request.head.deadline <= now


@dataclass(slots=True)
class NeuStreamPass(StepPass):
    """One pass: a batch of every op, filled in the order of arrival. `EarliestFinish` then chooses between them."""

    served: Sequence[Request] = ()  # in the order of arrival
    alone: Mapping[str, LatencyAlone] = field(default_factory=dict)  # by request id
    _limits: dict[tuple[str, Work, float], int] = field(default_factory=dict)  # (op, work, stretch) -> batch limit

    def _admit(self) -> list[Request]:
        return list(self.served)

    def _rank(self, request: Request, node: Node) -> int:
        """Steps have the first rank that has their model to themselves, and all other nodes go to the last."""
        ranks = self.view.ranks_with(request.keys_of(node))
        return StepPass._rank(self, request, node) if node.name in request.workflow.step_names else ranks[-1]

    def _choose_nodes(self, request: Request, nodes: Sequence[Node]) -> None:
        for node in nodes:
            key = request.keys_of(node), node.op, self._ranks_of(request, node)
            if len(self._batches.get(key, ())) < self._limit(request, node):
                self._add([(request, node)])

    def _choose_step(self) -> Mapping[int, int]:
        """Fill one batch per denoiser, op and rank up to the op's batch limit; returns rank -> tokens."""
        tokens = Counter[int]()
        for request, node in self._ready_steps():
            sizes = request.sizes(node)
            size = sizes.num_step_tokens * sizes.num_rows
            ranks = self._ranks_of(request, node)
            chosen = self._batches.get((request.keys_of(node), node.op, ranks), ())
            fits = not chosen or tokens[ranks[0]] + size <= self.view.max_step_tokens
            if fits and len(chosen) < self._limit(request, node):
                self._add([(request, node)])
                tokens[ranks[0]] += size
        return tokens

    def _limit(self, request: Request, node: Node) -> int:
        """Largest batch within the request's partial SLO for this op; 1 if no batch is."""
        op, keys = op_of(node), request.keys_of(node)
        work = request.work(node)
        key = node.op, work, self.alone[request.id].stretch
        limit = self._limits.get(key)
        if limit is None:
            seconds = partial(self.view.batch_seconds, keys, op, work)
            most = self.view.largest_batch(keys, op)
            number = self.view.config.max_num_seqs if most is None else max(1, most // len(work.queries))
            limit = largest_batch(seconds, SHARE * key[2] * seconds(), number)
            limit = self._limits[key] = max(1, limit)
        return limit

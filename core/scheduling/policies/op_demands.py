"""What the ops of requests need of ranks, for shares by normalised goodput (`core.costs.shares`)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from core.costs.shares import Demand
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.deadlines import due
from core.scheduling.policies.work_left import WorkLeft
from core.scheduling.request import Request
from core.scheduling.view import View

STRETCH = 3.0
"""Partial SLO of requests without a due time, as a multiple of an op's latency alone."""

MIN_SECONDS = 1e-6
"""Least time of a batch, where none was measured."""


def demands_of(view: View, requests: Sequence[Request], work: WorkLeft) -> dict[str, Demand]:
    """What the ops of these requests need, the mean over the requests."""
    kinds: dict[str, list[tuple[Request, Node]]] = {}
    for request in requests:
        for node in request.workflow.nodes:
            if request.progress.times(node):
                kinds.setdefault(node.op, []).append((request, node))
    stretch = mean(_stretch(view, request, work) for request in requests)
    return {op: _demand(view, of, len(requests), stretch, work) for op, of in kinds.items()}


def _demand(view: View, runs: list[tuple[Request, Node]], num_requests: int, stretch: float, work: WorkLeft) -> Demand:
    request, node = runs[0]
    model, op, size = request.head.model, op_of(node), op_of(node).size(request.sizes(node))
    most = view.largest_batch(model, op)
    times = sum(request.progress.times(node) for request, node in runs) / num_requests

    def seconds(number: int) -> float:
        return max(work.seconds(view, model, op, Work(size.queries, size.keys), number), MIN_SECONDS)

    number = view.config.max_num_seqs if most is None else max(1, most // max(1, len(size.queries)))
    if op.sharing != "together" and most is None:
        number = 1  # it runs its items one after the other
    return Demand(seconds, number, stretch * seconds(1), times)


def _stretch(view: View, request: Request, work: WorkLeft) -> float:
    time, alone = due(request.head), work.of(view, request).alone
    return max(1.0, (time - request.head.arrival) / alone) if time is not None and alone > 0 else STRETCH

"""RemainingLoads: the work that requests have left, as former admission and deadlines predict it."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.baselines.former.inside_view import added_seconds, base_seconds
from core.costs.useful_degree import useful_degree
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.requests.request import Request, Status
from core.scheduling.view import View


class RemainingLoad(NamedTuple):
    """The remaining work of one request."""

    steps_left: int
    step_seconds: float  # added to a step of its batch, the mean over its steps left
    other_seconds: float  # all else that is done for it alone


class RemainingLoads:
    """Keeps the predictions for waiting requests, because these do not change and queues are long. One per policy.

    shares_steps: whether several ranks compute a step together, where that is useful.
    """

    def __init__(self, *, shares_steps: bool) -> None:
        self._shares_steps = shares_steps
        self._waiting: dict[str, RemainingLoad] = {}  # by request id

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._waiting.pop(request_id, None)

    def of(self, view: View, request: Request) -> RemainingLoad:
        """The remaining work of a request, without loading its model."""
        if request.status is not Status.WAITING:
            self._waiting.pop(request.id, None)
            return self._predict(view, request)
        load = self._waiting.get(request.id)
        if load is None:
            load = self._waiting[request.id] = self._predict(view, request)
        return load

    def _predict(self, view: View, request: Request) -> RemainingLoad:
        steps = request.progress.steps_left
        most_ranks = min(len(view.ranks), view.config.max_degree) if self._shares_steps else 1
        seconds = sum(_step_seconds(view, request, node, most_ranks) for node in request.workflow.steps)
        return RemainingLoad(steps, seconds / steps if steps else 0.0, _other_seconds(view, request))


def _step_seconds(view: View, request: Request, node: Node, most_ranks: int) -> float:
    """Seconds that the remaining runs of a node add to the steps of its batch."""
    canvas, steps = request.spec.canvas(node.canvas), request.progress.times_left(node)
    every, active, num_full = canvas.num_all_tokens, canvas.num_active_tokens, steps
    if request.spec.is_mask_aware and not node.canvas:
        first = request.progress.scheduled[node.name]
        num_full = request.spec.num_full_steps(first, first + steps)
    full = added_seconds(view, request, node, every, every)
    masked = added_seconds(view, request, node, active, every)
    if most_ranks > 1 and steps:
        full *= _share_left(view, request, node, every, every, most_ranks)
        masked *= _share_left(view, request, node, active, every, most_ranks)
    return request.spec.num_rows * (num_full * full + (steps - num_full) * masked)


def _share_left(view: View, request: Request, node: Node, queries: int, keys: int, most_ranks: int) -> float:
    """Time of a step on as many ranks as are useful, as a share of its time on one rank."""
    if op_of(node).parallel == "none" or request.runs_on_one_rank:
        return 1.0
    work, seconds, degree = Work.of_pairs([(queries, keys)] * request.spec.num_rows), dict[int, float](), 1
    keys_of, op = request.keys_of(node), op_of(node)
    while degree <= most_ranks and (found := view.step_seconds(keys_of, op, work, degree)):
        seconds[degree] = found
        degree *= 2
    return seconds[useful_degree(seconds)] / seconds[1] if seconds else 1.0


def _other_seconds(view: View, request: Request) -> float:
    seconds = 0.0
    for node in request.workflow.nodes:
        if node.name not in request.workflow.step_names and (times := request.progress.times_left(node)):
            work = request.work(node)
            pairs = zip(work.queries, work.keys, strict=True)
            added = sum(added_seconds(view, request, node, *pair) for pair in pairs)
            seconds += times * (base_seconds(view, request, node) + added)
    return seconds

"""StepSpeeds: how long a request's steps take on 1, 2, 4, ... ranks, and how many ranks are useful."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from core.costs.useful_degree import useful_degree
from core.graph.op import Op
from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.request import Request
from core.scheduling.view import View

MIN_GAIN = 0.8
"""A rank gains by computing two steps together if that takes less than this share of their time one by one."""


class StepCost(NamedTuple):
    """Seconds of a step that a request shares with others of the same components, on one rank."""

    base: float  # once for all of them
    extra: float  # that it adds


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of steps of one size."""

    seconds: dict[int, float]  # degree -> predicted seconds of a step, 0 if unknown; degree 1 is always there
    useful: int  # degree up to which every doubling saves much: B of DDiT
    is_small: bool  # only one rank is useful, and it gains by computing two such steps together
    cost: StepCost


NO_STEPS = Speeds({1: 0.0}, 1, is_small=True, cost=StepCost(0.0, 0.0))
"""The speeds of a request without steps."""


class StepSpeeds:
    """Keeps predictions between passes, because many requests need the same few."""

    def __init__(self) -> None:
        self._known: dict[tuple[ModelKeys, str, Work, int], Speeds] = {}
        self._made_of = 0  # predictions of the view

    def of(self, view: View, request: Request) -> Speeds:
        """The speeds of a request's next steps; if it is mask-aware, of the steps that compute its active tokens. Where
        ranks cannot share its steps, only degree 1 is predicted.
        """
        node = request.step_node
        if node is None:
            return NO_STEPS
        op, is_masked = op_of(node), request.spec.is_mask_aware and not node.canvas
        work = request.work_of(node, is_masked=is_masked)
        most = min(len(view.ranks), view.config.max_degree) if _can_be_shared(view, request, node) else 1
        keys = request.keys_of(node)
        key = keys, op.name, work, most
        if view.predictions != self._made_of:
            self._made_of = view.predictions
            self._known.clear()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _speeds(view, keys, op, work, most)
        return found


def _can_be_shared(view: View, request: Request, node: Node) -> bool:
    """Whether several ranks can compute a step of this node together."""
    has_pages_on_one_rank = node is request.workflow.paged and view.page_rank(request) is not None
    return op_of(node).parallel != "none" and not request.runs_on_one_rank and not has_pages_on_one_rank


def _speeds(view: View, keys: ModelKeys, op: Op, work: Work, most: int) -> Speeds:
    seconds, degree = {1: view.batch_seconds(keys, op, work)}, 2
    while degree <= most and seconds[1] and (found := view.step_seconds(keys, op, work, degree)):
        seconds[degree] = found
        degree *= 2
    useful = useful_degree(seconds)
    one, two = seconds[1], view.batch_seconds(keys, op, work + work)
    is_small = useful == 1 and (one == 0.0 or two < MIN_GAIN * 2 * one)
    extra = min(one, max(0.0, two - one))
    return Speeds(seconds, useful, is_small, StepCost(one - extra, extra))

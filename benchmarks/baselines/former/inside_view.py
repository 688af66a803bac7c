"""What the former policies read of a view that it does not show: the only place that knows its private members."""

from __future__ import annotations

from core.costs.cost_model import extra_seconds
from core.graph.workflow import Node, op_of
from core.scheduling.requests.bindings import Needs
from core.scheduling.requests.request import Request
from core.scheduling.view import View


def base_seconds(view: View, request: Request, node: Node) -> float:
    """The constant part of the predicted time of a batch of this node."""
    return _coefficients(view, request, node)[0]


def added_seconds(view: View, request: Request, node: Node, queries: int, keys: int) -> float:
    """Predicted seconds that a row adds to a batch of this node. queries, keys: its tokens."""
    return extra_seconds(_coefficients(view, request, node), queries, keys)


def load_seconds(view: View, needs: Needs) -> float:
    """Predicted seconds until the components of a request are loaded."""
    return view._residency.seconds_left(needs)


def _coefficients(view: View, request: Request, node: Node) -> tuple[float, ...]:
    predictor = view._predictor
    return predictor.cost.coefficients(predictor.key(request.keys_of(node), op_of(node)))

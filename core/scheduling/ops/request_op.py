"""RequestOp: an op that runs for requests. It makes their messages, and reads facts from their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.graph.op import OPS, Op, OpWork
from core.graph.workflow import Node

if TYPE_CHECKING:
    from core.messages.worker import ItemResult
    from core.scheduling.node_cache import NodePages
    from core.scheduling.requests.request import Request


def no_facts(request: Request, result: ItemResult) -> None:
    """Record nothing, for ops whose results say only that they are done."""


@dataclass(frozen=True, kw_only=True)
class RequestOp(Op):
    """An op that nodes of workflows may have."""

    make: Callable[[Request, Node, NodePages], OpWork]  # the message for running the node next
    note: Callable[[Request, ItemResult], None] = no_facts  # records the facts in a successful result


def request_op(node: Node) -> RequestOp:
    """A node's op. Raises KeyError if there is none of this name."""
    op = OPS[node.op]
    assert isinstance(op, RequestOp), f"op {op.name} does not run for requests"
    return op

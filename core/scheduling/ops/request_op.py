"""RequestOp: an op that runs for requests: how the scheduler makes its messages and reads its results."""

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
    """For ops whose results tell the scheduler nothing but that they are done."""


@dataclass(frozen=True, kw_only=True)
class RequestOp(Op):
    """An op of a workflow's nodes."""

    make: Callable[[Request, Node, NodePages], OpWork]  # the message for running the node next
    note: Callable[[Request, ItemResult], None] = no_facts  # records what a successful result tells of the request


def request_op(node: Node) -> RequestOp:
    """A node's op. Raises KeyError if there is none of this name."""
    op = OPS[node.op]
    assert isinstance(op, RequestOp), f"op {op.name} does not run for requests"
    return op

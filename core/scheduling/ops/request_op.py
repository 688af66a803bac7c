"""RequestOp: an op that runs for requests: how the scheduler makes its messages and reads its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.graph.op import OPS, Op, OpWork
from core.graph.workflow import Node

if TYPE_CHECKING:
    from core.cache.page_reservations import PageReservations
    from core.messages.engine import Canvas, Spec
    from core.messages.worker import ItemResult
    from core.scheduling.request import Request

FIRST_PASS_NODES = ("first_encode", "first_denoise")
"""Nodes of the workflow "hires" that work at `EditSpec.first_pass`."""


def no_facts(request: Request, result: ItemResult) -> None:
    """For ops whose results tell the scheduler nothing but that they are done."""


@dataclass(frozen=True, kw_only=True)
class RequestOp(Op):
    """An op of a workflow's nodes."""

    make: Callable[[Request, Node, PageReservations], OpWork]  # the message for running the node next
    note: Callable[[Request, ItemResult], None] = no_facts  # records what a successful result tells of the request


def request_op(node: Node) -> RequestOp:
    """A node's op. Raises KeyError if there is none of this name."""
    op = OPS[node.op]
    assert isinstance(op, RequestOp), f"op {op.name} does not run for requests"
    return op


def canvas_of(spec: Spec, node: Node) -> Canvas:
    """The canvas that a node works at."""
    if spec.first_pass is not None and node.name in FIRST_PASS_NODES:
        return spec.first_pass
    return spec

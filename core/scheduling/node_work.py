"""The work of running a node for a request. Sizes of requests never change, so it is computed once."""

from __future__ import annotations

from core.graph.work import Work
from core.graph.workflow import Node, op_of
from core.scheduling.request import Request


def node_work(request: Request, node: Node) -> Work:
    """Tokens that running `node` next computes, and those they attend to."""
    return work_of(request, node, is_masked=request.is_masked(node))


def work_of(request: Request, node: Node, *, is_masked: bool) -> Work:
    """The same of running it as a mask-aware step, or as one of all tokens."""
    key = node.name, is_masked
    work = request.known_work.get(key)
    if work is None:
        work = request.known_work[key] = op_of(node).size(request.sizes_of(node, is_masked=is_masked))
    return work

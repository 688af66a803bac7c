"""Makes the items of batches."""

from __future__ import annotations

from core.graph.workflow import Node
from core.messages.worker import Item
from core.scheduling.inputs import Ranks, input_refs
from core.scheduling.node_cache import NO_PAGES, NodeCache
from core.scheduling.ops.request_op import request_op
from core.scheduling.request import Request
from core.scheduling.values import ValueTable


def make_item(request: Request, node: Node, ranks: Ranks, cache: NodeCache, values: ValueTable) -> Item:
    """The request's item in a batch that runs `node` next, on these ranks."""
    op = request_op(node)
    work = op.make(request, node, NO_PAGES if op.pages == "none" else cache.read(request, node))
    version = request.progress.scheduled[node.name] + 1 if node.region else 0
    return Item(request.id, node.name, work, input_refs(request, node, ranks, values), version)

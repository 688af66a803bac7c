"""Takes over what a run of a node has made: progress, values, what the cache needs to know, messages for the client."""

from __future__ import annotations

from core.graph.workflow import Node
from core.messages.engine import PartialImage
from core.messages.worker import Batch, ItemResult
from core.scheduling.endings import Endings, finished
from core.scheduling.node_cache import NodeCache
from core.scheduling.ops.request_op import request_op
from core.scheduling.requests.request import Request, Status
from core.scheduling.values.request_values import note_choice, note_rounds, note_values
from core.scheduling.values.values import ValueTable


def advance(
    request: Request, node: Node, item: ItemResult, batch: Batch, values: ValueTable, cache: NodeCache, endings: Endings
) -> None:
    """Note a run that has succeeded."""
    progress = request.progress
    round_, index = progress.round_done(node), progress.pending.get(node.name, 0)
    if item.rounds and node.region in request.workflow.adaptive:
        note_rounds(values, request, node, item.rounds)
    progress.finish(node)
    note_values(values, request, node, round_, item.tensors, batch)
    if node.chooses:
        note_choice(values, request, node, item.chosen)
    request_op(node).note(request, item)
    cache.note_result(request, node, item)
    if not request.is_live:
        return
    if node.shows:
        endings.outputs.append(PartialImage(request_id=request.id, index=index, step=round_))
    elif node.name == request.workflow.output and not cache.is_spoilt(request):
        endings.end(request, Status.FINISHED, finished(request, cache.outcome(request)))

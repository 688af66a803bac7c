"""Updates a request's values when one of its nodes has run, when some are lost, or when it restarts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from core.graph.skipping import readers_of
from core.graph.workflow import Node, Workflow, outputs_of
from core.handles import TensorKey, TensorRef
from core.messages.worker import Batch
from core.scheduling.requests.request import Request
from core.scheduling.values.lineage import runs_to_keep
from core.scheduling.values.value_keys import keys_done, keys_read, num_reads
from core.scheduling.values.values import ValueTable


def note_values(
    values: ValueTable, request: Request, node: Node, round_: int, made: Iterable[TensorRef], batch: Batch
) -> None:
    """Note that a node has finished in this batch. The batch's ranks have the values that it made and those that were
    sent to it; values that it was the last to read are freed. To be called after `Progress.finish`. round_: the value
    of `Progress.round_done` before that.
    """
    if len(request.ranks) > 1:
        for ref in _deferred(batch, request.id, node.name):
            values.note_copy(ref.key, batch.ranks)
    progress = request.progress
    if node in request.workflow.counted_steps:
        request.degrees[node.name, round_] = len(batch.ranks)
    for ref in made:
        request.made_outputs.add((node.name, ref.key.name))
        values.add(ref, batch.ranks, num_reads(progress, node, ref.key.name, ref.key.version))
    for key in keys_done(request.id, progress, node, round_):
        values.done_reading(key)


def _deferred(batch: Batch, request_id: str, node: str) -> list[TensorRef]:
    """The inputs that other ranks have sent while this node ran."""
    items = [item for item in batch.items if item.request_id == request_id and item.node == node]
    return [ref for item in items for ref in item.inputs if ref.is_deferred]


def note_choice(values: ValueTable, request: Request, chooser: Node, reader: str) -> None:
    """Note which of its readers a node has chosen. Values that only skipped nodes would have read are freed. Raises
    ValueError if the node has no such reader.
    """
    progress = request.progress
    if reader not in readers_of(request.workflow, chooser.name):
        raise ValueError(f"{chooser.name} chose {reader!r}, which does not read what it makes")
    reads = {node.name: keys_read(request.id, progress, node, 0) for node in request.workflow.nodes}
    for name in progress.choose(chooser, reader):
        for key in reads[name]:
            values.done_reading(key)


def resume(values: ValueTable, request: Request) -> None:
    """Let a request that was set back resume from the values that are left. Nothing of it may be in flight. The runs
    that made lost values are repeated, and all later runs of their nodes, whose values are freed.
    """
    progress = request.progress
    lost = [key for key in request.lost if values.get(key) is None]
    kept = runs_to_keep(request.id, progress, lost, lambda key: values.get(key) is not None, request.made_outputs)
    progress.rewind(kept)
    request.is_set_back = False
    for each in (request.lost, request.fixed_inputs, request.sent_to):
        each.clear()
    values.discard([key for key in values.keys(request.id) if key.node in kept and _is_made_again(key, kept)])
    _renew_all(values, request)


def _is_made_again(key: TensorKey, kept: Mapping[str, int]) -> bool:
    return not key.version or key.version > kept[key.node]


def _renew_all(values: ValueTable, request: Request) -> None:
    for key in values.keys(request.id):
        maker = request.workflow.node(key.node)
        values.renew(key, num_reads(request.progress, maker, key.name, key.version))


def restart(values: ValueTable, request: Request) -> None:
    """Restart the region that reads pages at its first round. Nothing of the request may be in flight. A node runs
    again if it belongs to the region or comes after it, or if the region needs a value of it that is used up or freed.
    All values of these nodes are freed.
    """
    paged, progress = request.workflow.paged, request.progress
    assert paged is not None
    again = _to_repeat(values, request, request.workflow.repeated_with(paged.region))
    progress.restart(again)
    request.fixed_inputs.clear()
    values.discard([key for key in values.keys(request.id) if key.node in again])
    _renew_all(values, request)


def _to_repeat(values: ValueTable, request: Request, first: Iterable[str]) -> set[str]:
    """Names of these nodes and, recursively, of the nodes that made values which they read and which are gone. If a
    node of a region has to run again, all nodes of the region do.
    """
    workflow, again = request.workflow, set[str]()
    wanted = set(first)
    while wanted:
        again |= wanted
        sources = {edge.source for name in wanted for edge in workflow.node(name).inputs} - again
        sources -= request.progress.skipped
        lost = [source for source in sources if not _is_whole(values, request, source)]
        wanted = {name for source in lost for name in _with_region(workflow, source)} - again
    return {name for name in again if not workflow.node(name).shows}


def _with_region(workflow: Workflow, name: str) -> set[str]:
    region = workflow.node(name).region
    return workflow.repeated_with(region) if region else {name}


def _is_whole(values: ValueTable, request: Request, name: str) -> bool:
    """Whether all values that a node has made are still there; if it repeats, those of its last round."""
    node = request.workflow.node(name)
    version = request.progress.rounds[node.region] if node.region else 0
    names = (port.name for port in outputs_of(node) if not port.is_optional)
    return all(values.get(TensorKey(request.id, name, each, version)) is not None for each in names)

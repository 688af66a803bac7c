"""What becomes of a request's values when one of its nodes has run, or when it begins again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from core.graph.op import OPS
from core.graph.workflow import Node
from core.handles import TensorKey, TensorRef
from core.scheduling.request import Request
from core.scheduling.value_keys import keys_done
from core.scheduling.values import ValueTable


def note_values(values: ValueTable, request: Request, node: Node, rounds: int, made: Iterable[TensorRef]) -> None:
    """Note that a node has finished: what it made is there, what it alone still read is free. rounds: of the loop that
    were done before it, see `keys_read`.
    """
    progress, readers = request.progress, _readers(request)
    is_last_round = rounds + 1 >= progress.num_steps
    for ref in made:
        values.add(ref, readers.get((node.name, ref.key.name, is_last_round), 0))
    for key in keys_done(request.id, request.workflow, node, rounds, is_last=progress.is_over(node)):
        values.done_reading(key)


def begin_again(values: ValueTable, request: Request) -> None:
    """Restart a request at the first step. Nothing of it may be in flight. Nodes run again if the loop replaces what
    they made, or if some of it is freed. What the loop has made is freed; all else is replaced by what runs again.
    """
    assert request.reservation is not None
    request.reservation.full_blocks, request.full_blocks = (), 0
    kept = [name for name in request.workflow.constant if _is_whole(values, request, name)]
    request.progress.restart(kept)
    again = [node for node in request.workflow.nodes if node.name not in kept and not request.progress.is_over(node)]
    readers = request.workflow.count_readers(again)
    for key in values.keys(request.id):
        if key.node in kept:
            values.renew(key, readers.get((key.node, key.name, True), 0))
    request.fixed_inputs.clear()
    values.discard(key for key in values.keys(request.id) if key.node == request.workflow.loop.name)


def _is_whole(values: ValueTable, request: Request, node: str) -> bool:
    """Whether all that a node has made is there still."""
    names = OPS[request.workflow.node(node).op].outputs
    return all(values.get(TensorKey(request.id, node, name)) is not None for name in names)


def _readers(request: Request) -> Mapping[tuple[str, str, bool], int]:
    return request.workflow.readers(with_sides=bool(request.progress.previews))

"""What becomes of a request's values when one of its nodes has run, or when it begins again."""

from __future__ import annotations

from collections.abc import Iterable

from core.graph.op import OPS
from core.graph.workflow import Node
from core.handles import TensorKey, TensorRef
from core.scheduling.request import Request
from core.scheduling.value_keys import keys_done
from core.scheduling.values import ValueTable


def note_values(values: ValueTable, request: Request, node: Node, rounds: int, made: Iterable[TensorRef]) -> None:
    """Note that a node has run: what it made is there, what it alone still read is free. rounds: of the loop that were
    done before it, see `keys_read`.
    """
    workflow, num_rounds = request.workflow, request.progress.num_steps
    is_last = rounds + 1 >= num_rounds
    for ref in made:
        values.add(ref, workflow.readers.get((node.name, ref.key.name, is_last), 0))
    for key in keys_done(request.id, workflow, node, rounds, num_rounds):
        values.done_reading(key)


def begin_again(values: ValueTable, request: Request) -> None:
    """Restart a request at the first step. Nothing of it may be in flight. Nodes run again if the loop replaces what
    they made, or if some of it is freed. What the loop has made is freed; all else is replaced by what runs again.
    """
    assert request.reservation is not None
    request.reservation.full_blocks, request.full_blocks = (), 0
    request.progress.restart(name for name in request.workflow.constant if _is_whole(values, request, name))
    request.fixed_inputs.clear()
    values.discard(key for key in values.keys(request.id) if key.node == request.workflow.loop.name)


def _is_whole(values: ValueTable, request: Request, node: str) -> bool:
    """Whether all that a node has made is there still."""
    names = OPS[request.workflow.node(node).op].outputs
    return all(values.get(TensorKey(request.id, node, name)) is not None for name in names)

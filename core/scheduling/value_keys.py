"""The keys of the values that a node reads.

What a loop carries from round to round is a new value each time: version 0 is made by a node before the loop, version v
by the loop's round v. Everything else has version 0, except what a round makes besides, which has the round's version.
"""

from __future__ import annotations

from core.graph.workflow import Node, Workflow
from core.handles import TensorKey


def fixed_keys(request_id: str, workflow: Workflow, node: Node) -> list[TensorKey]:
    """The values that a node reads and that exist once."""
    return [TensorKey(request_id, source, name) for source, name in workflow.reads[node.name].fixed]


def round_keys(request_id: str, workflow: Workflow, node: Node, rounds: int) -> list[TensorKey]:
    """The values that a node reads and that every round of the loop makes again. rounds: of the loop that are done
    before the node reads them; for the loop itself, before the round in question.
    """
    names = workflow.reads[node.name].of_round
    if not rounds:
        return [TensorKey(request_id, source, name) for source, name in names]
    loop = workflow.loop.name
    return [TensorKey(request_id, loop, name, rounds) for _, name in names]


def keys_read(request_id: str, workflow: Workflow, node: Node, rounds: int) -> list[TensorKey]:
    """All values that a node reads. rounds: as for `round_keys`."""
    return fixed_keys(request_id, workflow, node) + round_keys(request_id, workflow, node, rounds)


def keys_done(request_id: str, workflow: Workflow, node: Node, rounds: int, *, is_last: bool) -> list[TensorKey]:
    """The values that a node does not read any more after it has run. rounds: as for `round_keys`. is_last: it does not
    run again for this request.
    """
    keys = round_keys(request_id, workflow, node, rounds)
    return keys + fixed_keys(request_id, workflow, node) if is_last else keys

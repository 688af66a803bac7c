"""Which values a node reads and makes, by version, and how many nodes read a value.

What a loop carries from round to round is a new value each time: version 0 is made by a node before the loop, version v
by the loop's round v. Everything else has version 0, except what a round makes besides, which has the round's version.
"""

from __future__ import annotations

from core.graph.workflow import Edge, Node, Workflow
from core.handles import TensorKey


def keys_read(request_id: str, workflow: Workflow, node: Node, rounds: int) -> list[TensorKey]:
    """The values that a node reads. rounds: of the loop that are done before it; for the loop itself, before the round
    in question.
    """
    return [_key(request_id, workflow, edge, rounds) for edge in node.inputs]


def keys_done(request_id: str, workflow: Workflow, node: Node, rounds: int, num_rounds: int) -> list[TensorKey]:
    """The values that a node does not read any more after it has run. rounds: as for `keys_read`; num_rounds: of the
    loop in all.
    """
    is_last = node.kind != "loop" or rounds + 1 == num_rounds
    edges = (edge for edge in node.inputs if is_last or edge.is_carried)
    return list(dict.fromkeys(_key(request_id, workflow, edge, rounds) for edge in edges))


def num_readers(workflow: Workflow, node: Node, name: str, version: int, num_rounds: int) -> int:
    """How many nodes will read what `node` has made under this name and version."""
    if node.kind == "loop":
        sources = {source for source, carried in workflow.carried if carried == name}
        if sources and version < num_rounds:
            return 1  # the next round
        sources.add(node.name)
        return sum(_reads(other, sources, name) for other in workflow.nodes if other.kind != "loop")
    if (node.name, name) in workflow.carried:
        return 1  # the first round
    return sum(_reads(other, {node.name}, name) for other in workflow.nodes)


def _reads(node: Node, sources: set[str], name: str) -> bool:
    return any(edge.source in sources and edge.name == name for edge in node.inputs)


def _key(request_id: str, workflow: Workflow, edge: Edge, rounds: int) -> TensorKey:
    is_replaced = (edge.source, edge.name) in workflow.carried
    if rounds and (is_replaced or edge.source == workflow.loop.name):
        return TensorKey(request_id, workflow.loop.name, edge.name, rounds)
    return TensorKey(request_id, edge.source, edge.name)

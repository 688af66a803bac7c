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
    return [_key(request_id, workflow, node, edge, rounds) for edge in node.inputs]


def keys_done(request_id: str, workflow: Workflow, node: Node, rounds: int, num_rounds: int) -> list[TensorKey]:
    """The values that a node does not read any more after it has run. rounds: as for `keys_read`; num_rounds: of the
    loop in all.
    """
    is_last = node.kind != "loop" or rounds + 1 == num_rounds
    edges = (edge for edge in node.inputs if is_last or edge.is_carried)
    return list(dict.fromkeys(_key(request_id, workflow, node, edge, rounds) for edge in edges))


def num_readers(workflow: Workflow, node: Node, name: str, version: int, num_rounds: int) -> int:
    """How many nodes will read what `node` has made under this name and version. Nodes after the loop read what its
    last round has made; a side node, what the rounds that it shows have made for it.
    """
    if node.kind == "loop":
        sources = {source for source, carried in workflow.carried if carried == name}
        if sources and version < num_rounds:
            return 1  # the next round
        kinds = ("side", "once") if version == num_rounds else ("side",)
        readers = (other for other in workflow.nodes if other.kind in kinds and other.name in workflow.after_loop)
        return sum(_reads(other, sources | {node.name}, name) for other in readers)
    is_replaced = (node.name, name) in workflow.carried
    readers = (other for other in workflow.nodes if not (is_replaced and other.name in workflow.after_loop))
    return sum(_reads(other, {node.name}, name) for other in readers)


def _reads(node: Node, sources: set[str], name: str) -> bool:
    return any(edge.source in sources and edge.name == name for edge in node.inputs)


def _key(request_id: str, workflow: Workflow, node: Node, edge: Edge, rounds: int) -> TensorKey:
    sees_rounds = node.kind == "loop" or node.name in workflow.after_loop
    is_of_round = (edge.source, edge.name) in workflow.carried or edge.source == workflow.loop.name
    if rounds and sees_rounds and is_of_round:
        return TensorKey(request_id, workflow.loop.name, edge.name, rounds)
    return TensorKey(request_id, edge.source, edge.name)

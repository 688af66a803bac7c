"""Which nodes of a workflow never run, because a node has chosen another of its readers."""

from __future__ import annotations

from collections.abc import Mapping

from core.graph.workflow import Edge, Node, Workflow


def skipped_by(workflow: Workflow, chosen: Mapping[str, str]) -> frozenset[str]:
    """The nodes skipped after these choices (node that chooses -> its reader): readers that were not chosen, and what
    only they lead to. A node that joins runs as long as one of its sources does.
    """
    skipped: set[str] = set()
    for node in workflow.nodes:
        dead = [_is_dead(node, edge, skipped, chosen) for edge in node.inputs]
        if dead and (all(dead) if node.joins else any(dead)):
            skipped.add(node.name)
    return frozenset(skipped)


def readers_of(workflow: Workflow, name: str) -> frozenset[str]:
    """Names of the nodes that read what a node makes."""
    return frozenset(workflow.reader_names.get(name, ()))


def _is_dead(node: Node, edge: Edge, skipped: set[str], chosen: Mapping[str, str]) -> bool:
    return edge.source in skipped or chosen.get(edge.source, node.name) != node.name

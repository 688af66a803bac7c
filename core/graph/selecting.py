"""Makes workflows whose mask is found in the picture from those whose mask is given."""

from __future__ import annotations

from dataclasses import replace

from core.graph.op import Port
from core.graph.workflow import Edge, Node, Workflow

SEGMENT = Node("segment", "segment")
SEARCH = Port("search", "search")


def selecting(workflow: Workflow) -> Workflow:
    """The workflow with a node that finds the mask, which all nodes that take a mask read. Steps read the active tokens
    in shared memory: each comes after such a node."""
    nodes = tuple(
        replace(node, inputs=(*node.inputs, Edge(SEGMENT.name, "mask"))) if node.op == "image_encode" else node
        for node in workflow.nodes
    )
    inputs = (*(port for port in workflow.inputs if port.type != "mask"), SEARCH)
    return replace(workflow, name=selected_name(workflow.name), nodes=(SEGMENT, *nodes), inputs=inputs)


def selected_name(name: str) -> str:
    """Name of the workflow that is made of the one with this name."""
    return f"selected_{name}"

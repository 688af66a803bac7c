"""Makes workflows whose steps are steered by ControlNets from those without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from core.graph.op import Port
from core.graph.workflow import Edge, Node, Workflow

CONTROLS = Port("controls", "controls")


def controlled(workflow: Workflow) -> Workflow:
    """The workflow with ControlNets before each step of the request's own model. They read what the step reads, and the
    control pictures, which are encoded once for each size of the picture. What they make is taken as the step runs.
    """
    nodes = tuple(each for node in workflow.nodes for each in _with_controlnet(node))
    return replace(workflow, name=controlled_name(workflow.name), nodes=nodes, inputs=(*workflow.inputs, CONTROLS))


def controlled_name(name: str) -> str:
    """Name of the workflow that is made of the one with this name."""
    return f"controlled_{name}"


def _with_controlnet(node: Node) -> Iterator[Node]:
    """The node, after those that it needs beside it. Steps of a refiner, which has a role, have none."""
    if node.op == "denoise" and not node.role:
        prefix = node.name.removesuffix("denoise")
        encode, net = f"{prefix}control_encode", f"{prefix}controlnet"
        yield Node(encode, "control_encode", literals=node.literals)
        read = (*node.inputs, Edge(encode, "controls"))
        yield Node(net, "controlnet", read, region=node.region, literals=node.literals)
        node = replace(node, inputs=(*node.inputs, Edge(net, "residuals", deferred=True)))
    yield node

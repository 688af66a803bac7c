"""Makes workflows whose steps go on with a kept state from those that begin with noise (approximate caching).

LegoDiffusion's pass (section 4.2): the node that makes the initial latents is replaced by one that looks them up.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from core.graph.op import Port
from core.graph.workflow import Node, Region, Workflow

STATE = Port("state", "state")


def recalling(workflow: Workflow) -> Workflow:
    """The workflow with a node that reads a kept state, in which its steps begin. It `can_recall`."""
    begin, steps = _begin_of(workflow), _steps_of(workflow)
    assert begin is not None, f"workflow {workflow.name} cannot recall"
    names = ("recall" if number == 1 else f"recall_{number}" for number in count(1))
    recall = Node(next(name for name in names if workflow.find(name) is None), "recall")
    nodes = (recall, *(_recalled(node, begin, recall) if node is steps else node for node in workflow.nodes))
    return replace(workflow, name=recalled_name(workflow.name), nodes=nodes, inputs=(*workflow.inputs, STATE))


def recalled_name(name: str) -> str:
    """Name of the workflow that is made of the one with this name."""
    return f"recalled_{name}"


def can_recall(workflow: Workflow) -> bool:
    """Whether its states depend on the prompt, the picture and the numbers of a request alone, and come about in one
    loop, of steps of the request's own model, from noise, at the strength that the request asks for.
    """
    steps, begin = _steps_of(workflow), _begin_of(workflow)
    if steps is None or begin is None:
        return False
    sources = [workflow.node(edge.source) for edge in steps.inputs]
    is_plain = not any(node.role or node.canvas for node in (steps, *sources))
    is_plain = is_plain and not any(node.inputs for node in sources)  # of a picture that a class has made, say
    region = next(region for region in workflow.regions if region.name == steps.region)
    ops = {node.op for node in sources}
    return is_plain and ops == {"text_encode", "image_encode"} and region == Region(region.name)


def _steps_of(workflow: Workflow) -> Node | None:
    """The one node of its denoising steps; None: there are none, or several."""
    steps = [node for node in workflow.nodes if node.op == "denoise"]
    return steps[0] if len(steps) == 1 else None


def _begin_of(workflow: Workflow) -> Node | None:
    """The node that makes the initial latents; None if steps are none, or begin with those of another kind of node."""
    steps = _steps_of(workflow)
    first = next((edge.source for edge in steps.inputs if edge.name == "latents"), "") if steps else ""
    begin = workflow.find(first)
    return begin if begin is not None and begin.op == "image_encode" else None


def _recalled(steps: Node, begin: Node, recall: Node) -> Node:
    """The steps with the state as their first latents. All else that begins them stays."""
    inputs = (
        replace(edge, source=recall.name) if (edge.source, edge.name) == (begin.name, "latents") else edge
        for edge in steps.inputs
    )
    return replace(steps, inputs=tuple(inputs))

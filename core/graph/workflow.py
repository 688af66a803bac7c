"""Workflow: the stages of making an image as a graph of nodes, their inputs, and which of them repeat.

A workflow is data: nodes with inputs, one of which is a loop. A request's progress (`core.graph.progress`) is its set
of finished nodes and a loop counter that catches up with its step count; there is no phase enum, so new graphs need no
new scheduler.

    text_encode  --prompt embeddings-----------+
                                               v
    image_encode --latents, condition, ...---> denoise (x steps) --latents--> decode
                                               |
                                               +--clean--> preview (after some steps)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

StageName = Literal["text_encode", "image_encode", "denoise", "decode"]
NodeKind = Literal["once", "loop", "side"]


@dataclass(frozen=True, slots=True)
class Edge:
    """An input of a node, which may start when the sources of its inputs are done."""

    source: str  # the node that makes the tensor
    name: str  # of the tensor
    deferred: bool = False  # read late in the node's work: the source only has to be running on the same rank


@dataclass(frozen=True, slots=True)
class Node:
    """One vertex of the graph."""

    name: str
    stage: StageName
    component: str  # the part of the model that it needs, see ModelKey
    inputs: tuple[Edge, ...] = ()
    kind: NodeKind = "once"  # once per request; loop: per denoising step; side: per preview of the loop's current state


@dataclass(frozen=True, slots=True)
class Workflow:
    """A directed graph of nodes, in topological order, ending in `output`."""

    name: str
    nodes: tuple[Node, ...]
    output: str

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.nodes:
            for edge in node.inputs:
                if edge.source not in seen and edge.source != node.name:
                    raise ValueError(f"workflow {self.name}: {node.name} reads {edge.source} before it is made")
            seen.add(node.name)
        if self.output not in seen:
            raise ValueError(f"workflow {self.name}: no node {self.output}")

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def loop(self) -> Node:
        """The loop region's node."""
        return next(node for node in self.nodes if node.kind == "loop")


INPAINT = Workflow(
    name="inpaint",
    nodes=(
        Node("text_encode", "text_encode", "text_encoder"),
        Node("image_encode", "image_encode", "vae"),
        Node(
            "denoise",
            "denoise",
            "transformer",
            inputs=(
                Edge("text_encode", "prompt_embeds"),
                Edge("text_encode", "text_lengths"),
                Edge("text_encode", "pooled_prompt_embeds"),
                Edge("image_encode", "latents"),
                Edge("image_encode", "condition"),
                Edge("image_encode", "outside"),
                Edge("image_encode", "sigmas"),
            ),
            kind="loop",
        ),
        Node("preview", "decode", "vae", inputs=(Edge("denoise", "clean"),), kind="side"),
        Node("decode", "decode", "vae", inputs=(Edge("image_encode", "latents"),)),
    ),
    output="decode",
)
"""Masked editing with one denoising loop."""


Placement = Mapping[str, int]
"""Node name -> rank of the worker that runs it."""


def place(workflow: Workflow, num_workers: int) -> Placement:
    """Decoding goes to the last worker, all else to the first, so that a decode never delays other requests' steps."""
    return {node.name: num_workers - 1 if node.stage == "decode" else 0 for node in workflow.nodes}

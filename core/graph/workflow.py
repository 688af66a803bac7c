"""The stage graph of a workflow: who feeds whom, what repeats, and how far one request has come through it.

A workflow is data: nodes with inputs, one of which may be a loop region. A request's progress is its set of finished
nodes and a loop counter that catches up with its step count; there is no phase enum, so new graphs need no new
scheduler.

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
    """An input: the tensor `name` that node `source` made. A node may start when its sources are done; a deferred edge
    is read late in the node's work, so its source only has to be under way on the same rank.
    """

    source: str
    name: str
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One vertex. kind: `once` runs a single time, `loop` runs once per denoising step, `side` once for each preview,
    of what the loop has made up to then. component: the model part it needs (see ModelKey).
    """

    name: str
    stage: StageName
    component: str
    inputs: tuple[Edge, ...] = ()
    kind: NodeKind = "once"


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
"""node name -> rank of the worker that runs it."""


def place(workflow: Workflow, num_workers: int) -> Placement:
    """Decoding goes to the last worker, all else to the first: a decode never delays the others' next step."""
    return {node.name: num_workers - 1 if node.stage == "decode" else 0 for node in workflow.nodes}

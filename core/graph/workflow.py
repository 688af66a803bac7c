"""Workflow: the ops of making an image as a graph of nodes, their inputs, and which of them repeat.

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
from functools import cache, cached_property
from typing import Literal

from core.graph.op import OPS, Op

NodeKind = Literal["once", "loop", "side"]


@dataclass(frozen=True, slots=True)
class Edge:
    """An input of a node, which may start when the sources of its inputs are done."""

    source: str  # the node that makes the tensor
    name: str  # of the tensor
    is_carried: bool = False  # the reader, a loop, replaces the tensor at every round
    deferred: bool = False  # read late in the node's work: the source only has to be running on the same rank


@dataclass(frozen=True, slots=True)
class Node:
    """One vertex of the graph."""

    name: str
    op: str  # name of its Op
    inputs: tuple[Edge, ...] = ()
    kind: NodeKind = "once"  # once per request; loop: per denoising step; side: per preview of the loop's current state


@dataclass(frozen=True)
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

    @cached_property
    def loop(self) -> Node:
        """The loop region's node."""
        return next(node for node in self.nodes if node.kind == "loop")

    @cached_property
    def carried(self) -> frozenset[tuple[str, str]]:
        """(node, name) of the tensors that the loop replaces at every round."""
        return frozenset((edge.source, edge.name) for edge in self.loop.inputs if edge.is_carried)

    @cached_property
    def constant(self) -> tuple[str, ...]:
        """Names of the nodes whose results do not depend on the loop: they are kept when the loop restarts."""
        carried = {source for source, _ in self.carried}
        once = (node for node in self.nodes if node.kind == "once" and node.name not in carried)
        return tuple(node.name for node in once if not self.reads_loop(node))

    @cached_property
    def after_loop(self) -> frozenset[str]:
        """Names of the nodes that come after the loop. Of what it replaces they read the last, others the first."""
        names = [node.name for node in self.nodes]
        return frozenset(names[names.index(self.loop.name) + 1 :])

    def reads_loop(self, node: Node) -> bool:
        """Whether a node after the loop reads what the loop has made or replaced."""
        return node.name in self.after_loop and any(
            edge.source == self.loop.name or (edge.source, edge.name) in self.carried for edge in node.inputs
        )


def op_of(node: Node) -> Op:
    """A node's op. Raises KeyError if none of this name is registered."""
    return OPS[node.op]


INPAINT = Workflow(
    name="inpaint",
    nodes=(
        Node("text_encode", "text_encode"),
        Node("image_encode", "image_encode"),
        Node(
            "denoise",
            "denoise",
            inputs=(
                Edge("text_encode", "prompt_embeds"),
                Edge("text_encode", "text_lengths"),
                Edge("text_encode", "pooled_prompt_embeds"),
                Edge("image_encode", "latents", is_carried=True),
                Edge("image_encode", "sampler", is_carried=True),
                Edge("image_encode", "condition"),
                Edge("image_encode", "outside"),
                Edge("image_encode", "sigmas"),
            ),
            kind="loop",
        ),
        Node("preview", "decode", inputs=(Edge("denoise", "clean"),), kind="side"),
        Node("decode", "decode", inputs=(Edge("image_encode", "latents"),)),
    ),
    output="decode",
)
"""Masked editing with one denoising loop."""


Placement = Mapping[str, int]
"""Node name -> rank of the worker that runs it."""


@cache
def place(workflow: Workflow, num_workers: int) -> Placement:
    """What reads the loop's results (decoding) goes to the last worker, all else to the first, so that a decode never
    delays other requests' steps.
    """
    return {node.name: num_workers - 1 if workflow.reads_loop(node) else 0 for node in workflow.nodes}

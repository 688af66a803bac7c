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

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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


@dataclass(frozen=True, slots=True)
class NodeReads:
    """What a node reads, as (node that makes it, name)."""

    fixed: tuple[tuple[str, str], ...]  # values that exist once
    # Values that the loop makes again in every round; for carried ones the node is the one that makes the first.
    of_round: tuple[tuple[str, str], ...]


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
                if edge.deferred:
                    raise ValueError(f"workflow {self.name}: {node.name} reads {edge.name} deferred: not supported")
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

    @cached_property
    def reads(self) -> Mapping[str, NodeReads]:
        """Node name -> what it reads."""
        return {node.name: self._reads_of(node) for node in self.nodes}

    def readers(self, *, with_sides: bool) -> Mapping[tuple[str, str, bool], int]:
        """(node, name of a value that it makes, whether the last round is done) -> how many nodes will read the value.
        Nodes after the loop read what its last round has made; a side node, what the rounds that it shows have made for
        it. Missing: none. with_sides: side nodes run for the request.
        """
        return self._readers_with_sides if with_sides else self._readers_without_sides

    @cached_property
    def _readers_with_sides(self) -> Mapping[tuple[str, str, bool], int]:
        return self.count_readers(self.nodes)

    @cached_property
    def _readers_without_sides(self) -> Mapping[tuple[str, str, bool], int]:
        return self.count_readers([node for node in self.nodes if node.kind != "side"])

    def count_readers(self, nodes: Iterable[Node]) -> Mapping[tuple[str, str, bool], int]:
        """As `readers`, with only these nodes as readers."""
        counts = Counter[tuple[str, str, bool]]()
        for node in nodes:
            for source, name in {(edge.source, edge.name) for edge in node.inputs}:
                counts.update((maker, name, is_last) for maker, is_last in self._makers_for(node, source, name))
        return counts

    def _makers_for(self, node: Node, source: str, name: str) -> Iterator[tuple[str, bool]]:
        """(node, whether the last round is done) of the values under this name that `node` reads."""
        loop, is_carried = self.loop, (source, name) in self.carried
        if node.kind == "loop" and is_carried:
            yield from ((source, False), (source, True), (loop.name, False))  # the first round, and each later one
        elif node.name in self.after_loop and (is_carried or source == loop.name):
            yield from ((loop.name, is_last) for is_last in ((False, True) if node.kind == "side" else (True,)))
        else:
            yield from ((source, False), (source, True))

    def _reads_of(self, node: Node) -> NodeReads:
        names = list(dict.fromkeys((edge.source, edge.name) for edge in node.inputs))
        sees_rounds = node.kind == "loop" or node.name in self.after_loop
        of_round = [key for key in names if sees_rounds and (key in self.carried or key[0] == self.loop.name)]
        return NodeReads(tuple(key for key in names if key not in of_round), tuple(of_round))

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

"""Previews: side nodes that show a request's picture on its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from core.graph.workflow import Edge, Node


def previews_of(
    nodes: Sequence[Node], decoding: Mapping[str, Node], picture: str, named: Callable[[str], str]
) -> tuple[Node, ...]:
    """Side nodes for those between a step and the picture; (): there are none, as what comes after the step needs more
    than its latents, chooses, or repeats. nodes: of the graph, in its order. decoding: node that decodes -> the side
    node that does so on the way. picture: the node that makes the picture. named: makes a name of its own for a node.
    """
    by_name = {node.name: node for node in nodes}
    wanted = _upstream(by_name, picture)
    shown = {side.shows for name, side in decoding.items() if name in wanted}
    if len(shown) != 1:
        return ()
    (step,) = shown
    sides = dict[str, Node]()  # node -> the side node that is as it is
    after = {step}
    for node in nodes:
        reads = {edge.source for edge in node.inputs if edge.source in after}
        if not reads or node.name == step:
            continue
        after.add(node.name)
        if node.name not in wanted:
            continue
        if node.name in decoding:
            sides[node.name] = decoding[node.name]
        elif reads <= sides.keys() and not (node.region or node.chooses or node.joins):
            sides[node.name] = _beside(node, sides, step, named)
    return tuple(sides.values()) if picture in sides else ()


def _beside(node: Node, sides: Mapping[str, Node], step: str, named: Callable[[str], str]) -> Node:
    """The side node that is as a node is."""

    def moved(edge: Edge) -> Edge:
        return replace(edge, source=sides[edge.source].name) if edge.source in sides else edge

    return replace(node, name=named(f"{node.name}_preview"), inputs=tuple(map(moved, node.inputs)), shows=step)


def _upstream(by_name: Mapping[str, Node], name: str) -> set[str]:
    """A node and all that it reads, directly or not."""
    found, left = {name}, [name]
    while left:
        sources = {edge.source for edge in by_name[left.pop()].inputs} - found
        found |= sources
        left += sources
    return found

"""Passes: the loops of denoising steps of a workflow, and which latents each begins with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from core.graph.workflow import Edge, Node, Region
from entrypoints.workflows.begin import Begin


class Passes:
    """The compiler adds each node that makes the first values of a loop, and then asks, for the loops in their order
    first."""

    def __init__(self, region_of: Mapping[str, str]) -> None:
        """region_of: node -> the loop that it is in, or ""."""
        self._region_of = region_of
        self._begins: dict[str, Begin] = {}  # node that makes first values -> how its loop begins
        self._regions: dict[str, Region] = {}  # by name
        self._before: dict[str, str] = {}  # region -> the step of another one that it goes on from

    def add(self, node: str, begin: Begin) -> None:
        """Note a node that makes the first values of a loop."""
        self._begins[node] = begin

    def region(self, name: str, step: Node) -> Region | None:
        """The region of a loop; None: no node that was added makes its first latents. step: a node of it. A loop that
        goes on from another takes as much of the noise schedule as that.
        """
        begin = self._begins.get(next((edge.source for edge in step.inputs if edge.carried), ""))
        if begin is None:
            return None
        region = replace(begin.steps, name=name)
        if begin.goes_on is not None and (before := self._region_of.get(begin.goes_on.source)):
            region = replace(region, strength=self._regions[before].strength)
            self._before[name] = begin.goes_on.source
        self._regions[name] = region
        return region

    def is_second(self, step: Node) -> bool:
        """Whether the loop of a step noises latents of steps before. step: as for `region`."""
        begin = self._begins.get(next((edge.source for edge in step.inputs if edge.carried), ""))
        return begin is not None and begin.is_second

    def shown(self, step: str) -> str:
        """The step whose rounds previews show for a picture of this one's: of those that go on from one another, the
        first, at which most of the noise is taken away."""
        while before := self._before.get(self._region_of[step]):
            step = before
        return step

    def joined(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """The nodes, of which those that read latents to go on with read them where they are made."""
        for node in nodes:
            yield replace(node, inputs=tuple(map(self._made, node.inputs)))

    def _made(self, edge: Edge) -> Edge:
        begin = self._begins.get(edge.source)
        if begin is None or begin.goes_on is None or edge.name != "latents":
            return edge
        return replace(begin.goes_on, port=edge.port, carried=edge.carried)

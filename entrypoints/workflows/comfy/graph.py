"""Graph: a ComfyUI graph whose nodes are known, and fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.errors import WorkflowError
from core.validation import shorten


@dataclass(frozen=True, slots=True)
class Source:
    """An output of a node."""

    node: Node
    output: int


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One node. values: of its inputs that are no links. links: input -> what it reads."""

    id: str
    kind: str  # name of its class
    values: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, Source] = field(default_factory=dict)

    def error(self, problem: str, name: str = "") -> WorkflowError:
        """The error for an input, or "" for the node."""
        where = f"node {shown(self.id)} ({shown(self.kind)}){f', input {shown(name)}' if name else ''}"
        return WorkflowError(f"{where}: {problem}", node=self.id, input=name)


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes by id, each after those that it reads."""

    nodes: Mapping[str, Node]

    def of(self, *kinds: str) -> list[Node]:
        """The nodes of these classes."""
        return [node for node in self.nodes.values() if node.kind in kinds]


def shown(text: str) -> str:
    """What a graph calls something, as a part of a line."""
    return shorten(text) if text.isprintable() else ascii(shorten(text))

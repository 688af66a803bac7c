"""Connected: where a node's inputs come from, once that is known; what a model is lowered with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.graph.workflow import Edge, Literal


@dataclass(frozen=True)
class Connected:
    """One invocation of a model, as the compiler sees it."""

    node: str  # its name
    edges: tuple[Edge, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)  # input -> the workflow's
    literals: Mapping[str, Literal] = field(default_factory=dict)
    region: str = ""
    canvases: Mapping[str, str] = field(default_factory=dict)  # node before it -> the canvas that it works at
    patches: tuple[object, ...] = ()  # models that were attached when it was invoked

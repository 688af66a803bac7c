"""Lowered: what an invocation of a model becomes in the engine's graph."""

from __future__ import annotations

from dataclasses import dataclass

from core.graph.workflow import Node
from core.run_class import RunClass


@dataclass(frozen=True)
class Lowered:
    """One node, and the classes that its role needs."""

    node: Node
    classes: tuple[RunClass, ...] = ()

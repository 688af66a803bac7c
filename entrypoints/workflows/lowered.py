"""Lowered: what an invocation of a model becomes in the engine's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.graph.op import Port
from core.graph.workflow import Node
from core.run_class import RunClass
from entrypoints.workflows.begin import Begin


@dataclass(frozen=True)
class Lowered:
    """One node, and the classes that its role needs."""

    node: Node
    classes: tuple[RunClass, ...] = ()
    # Input that is given one of the workflow's -> the field of requests for pictures that this stands for.
    fields: Mapping[str, Port] = field(default_factory=dict)
    loras: Mapping[str, float] | None = None  # of a step: adapter of the served model -> scale
    begin: Begin | None = None  # how the loop begins whose first values it makes
    preview: Node | None = None  # decodes on the way what the node decodes at the end

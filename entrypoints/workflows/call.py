"""Call: an invocation of a model, as a workflow records it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.graph.workflow import Literal
from entrypoints.workflows.branch import Branch
from entrypoints.workflows.model import Model
from entrypoints.workflows.value import Value


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """One node to be."""

    node: str
    model: Model
    arguments: Mapping[str, Value | Literal]
    patches: tuple[Model, ...]  # that the model had
    region: str  # the loop that it is in; "": none
    branch: Branch | None

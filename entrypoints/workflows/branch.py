"""Branch: what one of several outcomes of a choice leads to."""

from __future__ import annotations

from dataclasses import dataclass

from entrypoints.workflows.value import Value


@dataclass(eq=False, slots=True)
class Branch:
    """One branch. What its nodes read from outside passes a gate, the one node of it that reads the choice, so that
    all of them are skipped with the gate."""

    name: str
    gate: str  # name of the node
    parent: Branch | None  # in which its choice stands
    result: Value | None = None  # once it is recorded

"""Registered: what a file of workflows becomes, as data."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from core.errors import WorkflowError
from core.graph.workflow import Workflow
from core.run_class import RunClass


class Registered(msgspec.Struct, frozen=True):
    """Workflows of the engine's graph, and the classes of their nodes, as EngineConfig takes them."""

    workflows: tuple[Workflow, ...] = ()
    classes: tuple[RunClass, ...] = ()

    @classmethod
    def together(cls, several: Iterable[Registered]) -> Registered:
        """All of them; a class that several have is in it once. Raises WorkflowError for a name of two workflows."""
        workflows: dict[str, Workflow] = {}
        classes: list[RunClass] = []
        for each in several:
            for workflow in each.workflows:
                if workflow.name in workflows:
                    raise WorkflowError(f"workflow {workflow.name}: two have this name; give one another", node="")
                workflows[workflow.name] = workflow
            classes += [other for other in each.classes if other not in classes]
        return cls(tuple(workflows.values()), tuple(classes))

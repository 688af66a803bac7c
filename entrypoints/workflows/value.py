"""Value: what stands for a value while a workflow is written."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import WorkflowError
from core.graph.form import Form


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An input of a workflow, or what a node makes: known only while a request runs, so models can be given it, and
    Python cannot compute with it."""

    name: str  # of the workflow's input, or of the node's output
    form: Form
    node: str = ""  # that makes it; "": the workflow's input

    @property
    def key(self) -> tuple[str, str]:
        """Values with the same key are one."""
        return self.node, self.name

    def __str__(self) -> str:
        return f"{self.node}.{self.name}" if self.node else f"input {self.name}"

    def _unknown(self, remedy: str) -> WorkflowError:
        problem = f"{self} is known only while a request runs; {remedy}"
        return WorkflowError(problem, node=self.node, input="" if self.node else self.name)

    def __bool__(self) -> bool:
        raise self._unknown("choose(...) makes a branch")

    def __eq__(self, other: object) -> bool:
        raise self._unknown("a Model compares it, and choose(...) makes a branch")

    def __hash__(self) -> int:
        return id(self)

    def __index__(self) -> int:
        raise self._unknown("steps(...) makes a loop")

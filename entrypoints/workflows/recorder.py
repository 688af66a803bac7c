"""Recorder: what takes note of invocations of models while a workflow is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from core.errors import WorkflowError
from entrypoints.workflows.value import Value


class Recorder(Protocol):
    """The workflow that is being written."""

    def record(self, model: Any, arguments: Mapping[str, object]) -> tuple[Value, ...]:
        """Note an invocation; what stands for its outputs. Raises WorkflowError."""

    def loop(self, number: object) -> Iterator[Value]:
        """See `workflow.steps`."""

    def choose(self, verdict: object, branches: Mapping[str, Callable[[], object]]) -> Value:
        """See `workflow.choose`."""


current_recorder: ContextVar[Recorder | None] = ContextVar("current_recorder", default=None)
"""The workflow that was begun last, by thread."""


def recorder_for(what: str) -> Recorder:
    """The workflow that is being written. Raises WorkflowError if there is none; what: needs it."""
    found = current_recorder.get()
    if found is None:
        raise WorkflowError(f"{what}: there is no workflow yet; begin one by Workflow(name=...)", node="")
    return found

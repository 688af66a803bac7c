"""Lowers invocations of users' classes to nodes of the op run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import ClassVar, Protocol

from core.errors import InvalidRequestError, WorkflowError
from core.graph.op import Port
from core.graph.workflow import Node
from core.run_class import RunClass
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.lowered import Lowered
from entrypoints.workflows.params import InputParam, OutputParam

MAX_ROLE = 120
"""Most characters of the name of a class with its settings; of longer ones a digest stands for the settings."""


class Runnable(Protocol):
    """What is read of a Model."""

    dtype: ClassVar[str]
    seconds: ClassVar[float]
    load_seconds: ClassVar[float]
    nbytes: ClassVar[int]
    settings: dict[str, str | int | float | bool]
    inputs: dict[str, InputParam]
    outputs: dict[str, OutputParam]


def run_node(model: Runnable, connected: Connected) -> Lowered:
    """A node that runs a model's class. Raises WorkflowError that names it."""
    if connected.patches:
        problem = "a class of a user's own takes no patches; load what it needs in `load`"
        raise WorkflowError(f"node {connected.node}: {problem}", node=connected.node)
    run_class = _class_of(model, connected.node)
    node = Node(
        connected.node,
        "run",
        connected.edges,
        role=run_class.name,
        region=connected.region,
        takes=tuple(Port.of(each.name, each.form, is_optional=not each.required) for each in model.inputs.values()),
        makes=tuple(Port.of(each.name, each.form) for each in model.outputs.values()),
        given=connected.given,
        literals=connected.literals,
    )
    return Lowered(node, (run_class,))


def _class_of(model: Runnable, node: str) -> RunClass:
    kind = type(model)
    if "." in kind.__qualname__:
        problem = f"workers cannot import {kind.__qualname__}; define the class at the top of its module"
        raise WorkflowError(f"node {node}: {problem}", node=node)
    path = f"{kind.__module__}:{kind.__name__}"
    try:
        return RunClass(
            name=role_of_class(path, model.settings),
            path=path,
            settings=dict(model.settings),
            dtype=kind.dtype,
            seconds=kind.seconds,
            load_seconds=kind.load_seconds,
            nbytes=kind.nbytes,
        )
    except InvalidRequestError as error:
        raise WorkflowError(f"node {node}, class {kind.__name__}: {error}", node=node) from error


def role_of_class(path: str, settings: Mapping[str, object]) -> str:
    """The name of a class with these settings: equal for equal ones, so that workflows share it."""
    listed = ", ".join(f"{name}={value!r}" for name, value in sorted(settings.items()))
    if len(listed) > MAX_ROLE:
        listed = hashlib.sha256(listed.encode()).hexdigest()[:16]
    return f"{path}({listed})" if listed else path

"""FamilyModel: base class of the models whose nodes are of the engine's own ops."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

from core.errors import WorkflowError
from core.graph.form import tensor
from core.graph.op import Port
from core.graph.workflow import Edge, Node
from entrypoints.workflows.canvases import canvas_by_scale
from entrypoints.workflows.connected import Connected
from entrypoints.workflows.lowered import Lowered
from entrypoints.workflows.model import Model

OF_ENGINE = tensor("float32", 1)
"""Stands for values that only nodes of the engine's ops make and read, such as latents. These ops know type and size
themselves, and the check of a graph refuses all other readers."""

LARGER = "Upscaler()(latents) enlarges latents"


class FamilyModel(Model):
    """A model that the engine loads and runs itself. Its checkpoint is that of the served model, or of another one that
    plays a role for it, as the catalog says: `Denoiser(role="refiner")` is that of the model's `refiner`.
    """

    op: ClassVar[str]
    part: ClassVar[str] = ""  # what follows the role's name in the name of its own; the denoiser is the role itself
    fields: ClassVar[Mapping[str, Port]] = {}  # input -> the field of requests that it is given
    plain: ClassVar[Collection[str]] = ()  # those of them that may be numbers instead, the same for all requests
    repeats: ClassVar[bool] = False  # whether it is called in loops, and nowhere else

    def __init__(self, role: str = "") -> None:
        """role: "": the served model's. Raises WorkflowError."""
        if not isinstance(role, str) or (role and not role.isidentifier()):
            kind = type(self).__name__
            raise WorkflowError(f"{kind}, role: it is {role!r:.80}; a role is a Python identifier", node=kind)
        super().__init__(**({"role": role} if role else {}))
        self.role = f"{role}{self.part}" if role else ""

    def load(self, device: str, dtype: Any) -> NoReturn:
        raise NotImplementedError("the engine loads it")

    def execute(self, *args: Any, **inputs: Any) -> NoReturn:
        raise NotImplementedError("the engine runs it")

    def lower(self, connected: Connected) -> Lowered:
        """A node of its op. Raises WorkflowError."""
        self._check(connected)
        canvas = self.canvas(connected)
        node = Node(
            connected.node,
            self.op,
            tuple(self.edges(connected)),
            self.role,
            connected.region,
            literals={"canvas": canvas} if canvas else {},
        )
        return Lowered(node, fields={name: self.fields[name] for name in connected.given})

    def canvas(self, connected: Connected) -> str:
        """The canvas that its node works at. Raises WorkflowError for latents of another."""
        for edge in connected.edges:
            if connected.canvases[edge.source]:
                raise failure(connected, edge.input, f"it is of a smaller picture; {LARGER}")
        return ""

    def edges(self, connected: Connected) -> Iterator[Edge]:
        """What its node reads, by the names that its op has."""
        yield from connected.edges

    def _check(self, connected: Connected) -> None:
        if connected.patches:
            raise failure(connected, "", "it takes no patches; add them to the denoiser")
        if bool(connected.region) != self.repeats:
            where = "in `for step in steps(n)`" if self.repeats else "before or after a loop"
            raise failure(connected, "", f"call it {where}")
        for name in connected.literals:
            if name not in self.plain:
                problem = "it is a literal, and what the request says; give an input of the workflow"
                raise failure(connected, name, problem)
        for edge in connected.edges:
            if edge.input in self.fields:
                raise failure(connected, edge.input, "the request says it; give an input of the workflow")
        for name in connected.given:
            if name not in self.fields:
                raise failure(connected, name, "no request says it; give what another model makes")


def canvas_of(connected: Connected, name: str) -> str:
    """The canvas that an input is of; "": that of the final picture, or there is no such input."""
    return next((connected.canvases[edge.source] for edge in connected.edges if edge.input == name), "")


def scaled_canvas(connected: Connected) -> str:
    """The canvas that an input `scale` says; "": there is none. Raises WorkflowError."""
    try:
        return canvas_by_scale(connected)
    except ValueError as error:
        raise failure(connected, "scale", str(error)) from error


def failure(connected: Connected, name: str, problem: str) -> WorkflowError:
    """The error for an input of a node, or "" for the node."""
    where = f"node {connected.node}, input {name}" if name else f"node {connected.node}"
    return WorkflowError(f"{where}: {problem}", node=connected.node, input=name)

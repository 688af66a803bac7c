"""Op: a kind of work on one model component, and the open table of all ops.

An op describes itself, so that no other code matches on op names: what it reads and makes, which message carries it to
a worker, how large it is, how requests share a pass, and whether several ranks can compute it together. The ops of the
built-in workflows are in `core.scheduling.ops`; what a worker computes for them is in `model_executor.worker.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from core.graph.form import Form
from core.graph.work import Work

Sharing = Literal["together", "single"]
"""How the items of a batch share a pass. together: all in one ragged pass, whatever their sizes; single: one pass per
item."""

Parallel = Literal["none", "sequence"]
"""How several ranks compute one pass. none: each computes all of it; sequence: each has some rows, or some tokens of
every row, as is faster."""

PageUse = Literal["none", "latents", "span"]
"""What an op reads of the activation cache for a mask-aware request. latents: its template's clean latents; span: also
the pages at the step's noise level."""

Part = Literal["segment", "encode", "prime", "denoise", "decode", "run"]
"""The part of a request's time that an op's time is added to, as in the API's `stencil.ms`."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of an op, or of a node that has ports of its own."""

    name: str
    type: str  # kind of value; an edge joins an output and an input of the same type
    is_optional: bool = False  # an input that may be left unconnected; an output that some runs do not make
    form: Form | None = None  # of a node's own port: of which values, in more detail

    @classmethod
    def of(cls, name: str, form: Form, *, is_optional: bool = False) -> Port:
        """A port for a node of its own."""
        return cls(name, form.kind, is_optional, form)


class Sizes(Protocol):
    """The sizes of what a node does for a request, from which its op computes its work."""

    @property
    def num_rows(self) -> int:
        """Rows of a step: the prompt's, and with classifier-free guidance the negative prompt's."""

    @property
    def num_tokens(self) -> int:
        """Image tokens."""

    @property
    def num_reference_tokens(self) -> int:
        """Condition tokens of references."""

    @property
    def num_paged_reference_tokens(self) -> int:
        """Condition tokens of references if no step computes them, else 0."""

    @property
    def num_controls(self) -> int:
        """Control pictures."""

    @property
    def num_text_tokens(self) -> int:
        """Text tokens of a row."""

    @property
    def num_all_tokens(self) -> int:
        """Image, condition and text tokens of a row."""

    @property
    def num_step_tokens(self) -> int:
        """Tokens of a row that the next denoising step computes."""

    @property
    def num_elements(self) -> int:
        """Elements of all inputs of a node with ports of its own; until they are made, the most that are declared."""


class OpWork:
    """Base class of the messages that carry an op's work for one item. A message is encoded by its own type, and
    decoded by the type that the table has for its tag."""

    __slots__ = ()


@dataclass(frozen=True)
class Op:
    """One kind of work."""

    name: str
    component: str  # kind of model component that it runs on, see ModelKey
    message: type[OpWork]  # a tagged msgspec.Struct
    size: Callable[[Sizes], Work]  # the work of running it once for a request
    part: Part
    beside: str = ""  # kind of further components that it computes with, on the same rank; "": there are none
    # How batches are formed.
    sharing: Sharing = "single"
    parallel: Parallel = "none"
    # What it reads and makes.
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    has_own_ports: bool = False  # each of its nodes says itself what it reads and makes
    pages: PageUse = "none"
    literals: tuple[str, ...] = ()  # constants that a workflow may give to its nodes
    begins_region: bool = False  # its nodes make the first values of a region
    # Its nodes that repeat work for a step of their region, and count as none themselves. They may be sent to a rank
    # that lacks their inputs: it waits until other ranks have sent them.
    serves_step: bool = False
    makes_result: bool = False  # its nodes make results of requests, or show them on the way
    costs_as: str = ""  # name of the op whose cost line also predicts this one; "": it has a line of its own

    @property
    def cost_name(self) -> str:
        """Name of the cost line that predicts its time."""
        return self.costs_as or self.name

    @property
    def components(self) -> tuple[str, ...]:
        """All kinds of components that it computes with."""
        return (self.component, self.beside) if self.beside else (self.component,)


class OpTable:
    """Ops by name. Open: `register` adds one."""

    def __init__(self) -> None:
        self._ops: dict[str, Op] = {}
        self._messages: dict[str, type[OpWork]] = {}  # tag -> type

    def register(self, op: Op) -> None:
        """Add an op. Raises ValueError if its name or its message's tag is taken by another."""
        tag = _tag(op.message)
        if op.name in self._ops or self._messages.get(tag, op.message) is not op.message:
            raise ValueError(f"an op named {op.name}, or a message tagged {tag}, is registered already")
        self._ops[op.name] = op
        self._messages[tag] = op.message

    def unregister(self, name: str) -> None:
        """Remove an op. Raises KeyError if there is none of this name."""
        op = self._ops.pop(name)
        if not any(other.message is op.message for other in self._ops.values()):
            del self._messages[_tag(op.message)]

    def __getitem__(self, name: str) -> Op:
        """The op of this name. Raises KeyError that names it."""
        return self._ops[name]

    def __contains__(self, name: str) -> bool:
        return name in self._ops

    def __iter__(self) -> Iterator[Op]:
        """All ops, in the order of registration."""
        return iter(self._ops.values())

    def decode(self, members: object) -> OpWork:
        """The message with these decoded members. Raises msgspec.ValidationError if they are none of any op."""
        tag = members.get("type") if isinstance(members, dict) else None
        kind = self._messages.get(tag) if isinstance(tag, str) else None
        if kind is None:
            raise msgspec.ValidationError(f"no op has messages tagged {tag!r}")
        return msgspec.convert(members, kind)


def _tag(message: type[OpWork]) -> str:
    assert issubclass(message, msgspec.Struct)
    return str(message.__struct_config__.tag)


OPS = OpTable()
"""All ops of this process. `core.scheduling.ops` registers the built-in ones when it is imported."""

"""OwnFields: what a workflow of users' classes takes of a request, as fields and files beside those of the endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from core.errors import InvalidRequestError, WorkflowError
from core.graph.form import Form
from core.graph.op import Port
from core.graph.workflow import Workflow
from core.sampling_params import MAX_INFERENCE_STEPS
from entrypoints.openai.fields.field import Field, Kind, Scalar, Value
from entrypoints.openai.fields.fields import EDIT_FIELDS, GENERATION_FIELDS

FIELD_KINDS: dict[str, Kind] = {"truth": "boolean", "integer": "integer", "number": "number", "text": "string"}
"""Kind of a form -> that of its field."""

MODEL_FIELD = "model"
"""The field that names a workflow, which is never an input of it."""

FILE_FIELDS = (
    *("image", "images", "mask", "mask_image", "markup"),
    *("reference_image", "reference_images", "control_image"),
)
"""Names of the pictures that edits and generations take."""


@dataclass(frozen=True)
class OwnField(Field):
    """A field of a declared form. max_bytes: of a text, in UTF-8."""

    max_bytes: int | None = None

    @classmethod
    def of(cls, name: str, form: Form, *, is_counter: bool = False) -> OwnField:
        """The field of an input that is no picture and no tensor. is_counter: a loop has so many rounds."""
        low, high = (-(2**63), 2**63 - 1) if form.kind == "integer" else (None, None)
        if is_counter:
            low, high = 1, MAX_INFERENCE_STEPS
        most = form.size if form.kind == "text" else None
        return cls(name, FIELD_KINDS[form.kind], f"An input of a workflow: {form}.", low, high, max_bytes=most)

    def _checked(self, value: Scalar) -> Scalar:
        value = super()._checked(value)
        if isinstance(value, str) and self.max_bytes is not None:
            nbytes = len(value.encode("utf-8", "replace"))
            if nbytes > self.max_bytes:
                message = f"Invalid '{self.name}': string too long; it has {nbytes} bytes, of at most {self.max_bytes}."
                raise InvalidRequestError(message, param=self.name, code="string_above_max_length")
        return value


@dataclass(frozen=True)
class OwnFields:
    """Of one workflow. is_alone: all that it takes are fields and files of its own, whatever the endpoint's fields of
    these names mean; otherwise it works for a model, and the endpoint's own fields that have an effect keep their
    meaning.
    """

    workflow: str
    ports: tuple[Port, ...]
    is_alone: bool
    counters: frozenset[str] = frozenset()  # integers that say how many rounds a loop has

    @classmethod
    def of(cls, workflow: Workflow) -> OwnFields:
        """Of a registered workflow. The prompt of a model is the request's."""
        is_alone = not workflow.is_for_pictures
        ports = tuple(port for port in workflow.own_inputs if is_alone or port.name != "prompt")
        counters = frozenset(region.rounds for region in workflow.regions if isinstance(region.rounds, str))
        return cls(workflow.title, ports, is_alone, counters)

    @cached_property
    def fields(self) -> dict[str, Field]:
        """Fields of numbers, texts and truth values, by name."""
        plain = ((port.name, port.form) for port in self.ports if port.form is not None and port.form.is_plain)
        return {name: OwnField.of(name, form, is_counter=name in self.counters) for name, form in plain}

    def over(self, fields: Mapping[str, Field]) -> dict[str, Field]:
        """The fields of a request. fields: the endpoint's."""
        stronger = {} if self.is_alone else {name: field for name, field in fields.items() if field.has_effect}
        return {**fields, **self.fields, **stronger}

    @cached_property
    def pictures(self) -> tuple[str, ...]:
        """Names of the pictures that it takes."""
        return tuple(port.name for port in self.ports if port.type == "picture")

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that it takes."""
        return tuple(port.name for port in self.ports if port.type == "tensor")

    def given_of(self, values: Mapping[str, Value]) -> dict[str, Any]:
        """The inputs among the values of a request."""
        return {port.name: values[port.name] for port in self.ports if port.name in values}


@dataclass(frozen=True)
class OwnFieldsByModel:
    """Of all models and workflows that a request may name; "" names the first model."""

    by_name: Mapping[str, OwnFields]

    def of(self, model: str) -> OwnFields | None:
        """What the named one takes; None: nothing of its own."""
        return self.by_name.get(model)

    @cached_property
    def names(self) -> frozenset[str]:
        """All fields that any of them takes."""
        return frozenset(port.name for own in self.by_name.values() for port in own.ports)

    @cached_property
    def files(self) -> frozenset[str]:
        """All pictures and tensors that any of them takes."""
        return frozenset(name for own in self.by_name.values() for name in (*own.pictures, *own.tensors))

    @cached_property
    def most_files(self) -> int:
        """Most pictures and tensors that any of them takes."""
        return max((len(own.pictures) + len(own.tensors) for own in self.by_name.values()), default=0)


NOTHING_OWN = OwnFieldsByModel({})
"""Where there are no workflows of users."""


def check_inputs(workflows: Iterable[Workflow]) -> None:
    """Raises WorkflowError for an input that requests cannot give, as its name means something else in them."""
    for workflow in workflows:
        name, problem = unfit_name(workflow)
        if problem:
            raise WorkflowError(f"workflow {workflow.title}, input '{name}': {problem}", node="", input=name)


def unfit_name(workflow: Workflow) -> tuple[str, str]:
    """(input of a workflow whose name means something else in requests, what is wrong with it); ("", ""): none."""
    own = OwnFields.of(workflow)
    for port in own.ports:
        if port.name == MODEL_FIELD:
            return port.name, "requests name the workflow by this field; call it otherwise"
        if not own.is_alone and not _fits(port.name, own.fields):
            return port.name, f"it is a {port.form}, and requests have another field of this name; call it otherwise"
    return "", ""


def _fits(name: str, own: Mapping[str, Field]) -> bool:
    """Whether a model's requests can have an input of this name: they have no such field, or one of its kind; of a text
    with few choices only if it has no effect, as the input's own field takes its place then.
    """
    field = EDIT_FIELDS.get(name) or GENERATION_FIELDS.get(name)
    if field is None:
        return name not in FILE_FIELDS
    is_narrow = field.has_effect and bool(field.choices)
    return type(field) is Field and not is_narrow and name in own and own[name].kind == field.kind

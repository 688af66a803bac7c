"""RequestFields: the inputs of a workflow that are fields of requests for pictures."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from core.graph.op import Port
from entrypoints.workflows.value import Value

PROMPT = Port("prompt", "text")
"""The one field that classes can read, too, of a workflow whose input has this name."""

PARAMETER = "parameter"
"""Type of a field that every request has, so that graphs have no input for it."""

SEED, NUM_STEPS = Port("seed", PARAMETER), Port("num_inference_steps", PARAMETER)
STRENGTH, HIRES_STRENGTH = Port("strength", PARAMETER), Port("hires_strength", PARAMETER)
HIRES_SCALE, REFINER_START = Port("hires_scale", "number"), Port("refiner_start", "number")


class RequestFields:
    """The fields of one workflow, by the name of the input."""

    def __init__(self) -> None:
        self._fields: dict[str, Port] = {}

    def add(self, name: str, field: Port) -> str:
        """Let an input be a field. Returns why it cannot be one; "": it can."""
        if (known := self._fields.get(name, field)) != field:
            return f"input {name} of the workflow is the request's {known.name} already"
        if field in (each for other, each in self._fields.items() if other != name):
            return f"two inputs of the workflow are the request's {field.name}"
        self._fields[name] = field
        return ""

    def ports(self, inputs: Mapping[str, tuple[Value, bool]], of_classes: Collection[str]) -> Iterator[Port]:
        """The inputs of the workflow's graph. inputs: name -> (value, whether requests must give it). of_classes: names
        of the inputs that classes read.
        """
        for name, (value, required) in inputs.items():
            field = self._fields.get(name)
            if field is None or (name == PROMPT.name and name in of_classes):
                yield Port.of(name, value.form, is_optional=not required)
            elif field.type != PARAMETER:
                yield replace(field, is_optional=not required)

    def unreadable(self, of_classes: Collection[str]) -> str:
        """The first field that classes read, though they cannot; "": none."""
        fields = (name for name, field in self._fields.items() if (name, field) != (PROMPT.name, PROMPT))
        return next((name for name in fields if name in of_classes), "")

"""RequestFields: the inputs of a workflow that are fields of requests for pictures."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from core.graph.op import Port
from entrypoints.workflows.value import Value

PROMPT = "prompt"
"""The one field that classes read, too: of a workflow that calls the input so."""


class RequestFields:
    """Of one workflow."""

    def __init__(self) -> None:
        self._fields: dict[str, Port | None] = {}  # input -> the field; None: a sampling parameter

    def why_not(self, name: str, field: Port | None) -> str:
        """Note that an input is a field. Returns why it cannot be; "": it is."""
        others = {other: each for other, each in self._fields.items() if other != name}
        if self._fields.setdefault(name, field) != field:
            return f"input {name} is another field of requests already"
        if field is not None and field in others.values():
            return f"two inputs of the workflow are the request's {field.name}"
        return ""

    def ports(self, inputs: Mapping[str, tuple[Value, bool]], of_classes: Collection[str]) -> Iterator[Port]:
        """The workflow's inputs in its graph. inputs: name -> (value, whether requests must give it). of_classes: names
        of those that classes read.
        """
        for name, (value, required) in inputs.items():
            if name not in self._fields or (name == PROMPT and name in of_classes):
                yield Port.of(name, value.form, is_optional=not required)
            elif (field := self._fields[name]) is not None:
                yield replace(field, is_optional=not required)

    def unreadable(self, of_classes: Collection[str]) -> str:
        """An input that classes read and cannot, since only a field of this name has it; "": none."""
        return next((name for name in self._fields if name in of_classes and name != PROMPT), "")

"""Lora: an adapter as a request names it, over HTTP and offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from core.errors import InvalidRequestError
from core.validation import check_decimal, check_filled, check_length, conformed

MAX_LORAS = 8
"""Most adapters of a request."""

MAX_NAME_CHARACTERS = 512

MAX_SCALE = 100.0

_FORMS = 'a name, an object with "name" and "scale", or a list of these'


class Lora(msgspec.Struct, frozen=True):
    """An adapter and its scale, -MAX_SCALE..MAX_SCALE. Raises InvalidRequestError that names the field `lora`."""

    name: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        name, scale = conformed("lora", self.name, str), conformed("lora", self.scale, float)
        check_filled("lora", name)
        check_length("lora", name, MAX_NAME_CHARACTERS)
        check_decimal("lora", scale, -MAX_SCALE, MAX_SCALE)
        msgspec.structs.force_setattr(self, "name", name)
        msgspec.structs.force_setattr(self, "scale", scale)


def named_loras(value: object) -> tuple[Lora, ...]:
    """The adapters that a value of the field `lora` names: a name, a Lora or an object with its members, or a list of
    these; none for None, "" and an empty list. Raises InvalidRequestError."""
    if value is None or (isinstance(value, str) and not value):
        return ()
    if isinstance(value, str | Lora | Mapping) or not isinstance(value, Sequence) or isinstance(value, bytes):
        return (_lora(value),)
    if len(value) > MAX_LORAS:
        message = f"Invalid 'lora': array too long. Expected at most {MAX_LORAS} adapters, but got {len(value)}."
        raise InvalidRequestError(message, param="lora", code="array_above_max_length")
    return tuple(map(_lora, value))


def _lora(value: object) -> Lora:
    match value:
        case Lora():
            return value
        case str():
            return Lora(value)
        case Mapping() if value.keys() in ({"name"}, {"name", "scale"}):
            return Lora(value["name"], value.get("scale", 1.0))
        case Mapping():
            raise InvalidRequestError(f"Invalid 'lora': expected {_FORMS}.{_remedy(value)}", param="lora")
    message = f"Invalid type for 'lora': expected {_FORMS}, but got {type(value).__name__} instead."
    raise InvalidRequestError(message, param="lora", code="invalid_type")


def _remedy(members: Mapping[object, object]) -> str:
    """What to do about members of other servers' objects."""
    if not {"path", "lora_path", "local_path"} & members.keys():
        return ""
    return " A file is loaded beforehand: --lora, POST /v1/load_lora_adapter."

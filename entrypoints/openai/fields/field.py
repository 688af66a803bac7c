"""Field: one scalar field of a request. Parsing is strict: values are never coerced or clamped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from core.errors import InvalidRequestError
from core.lora import Lora
from core.validation import check_choice, check_decimal, check_integer, check_length, shorten

Kind = Literal["string", "integer", "number", "boolean"]
Scalar = str | int | float | bool
Value = Scalar | tuple[Lora, ...] | tuple[Scalar, ...] | tuple[tuple[float, ...], ...]

T = TypeVar("T")
INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_DECIMAL = re.compile(r"[+-]?([0-9]{1,30}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?")
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_KIND_OF_JSON = {str: "string", int: "integer", float: "number", bool: "boolean"}


def decode_json(data: bytes | bytearray | msgspec.Raw, type_: type[T]) -> T:
    """Decode JSON as `type_`. Raises InvalidRequestError (``invalid_json``) if it is malformed, and lets msgspec's
    ValidationError through if it has another type.
    """
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"Could not parse the JSON body: {error}.", code="invalid_json") from error


@dataclass(frozen=True)
class Field:
    """One scalar field of a request."""

    name: str
    kind: Kind
    meaning: str  # its description in the OpenAPI schema
    low: float | None = None  # bounds of a number, inclusive
    high: float | None = None
    choices: tuple[str, ...] = ()  # valid strings; empty: any
    max_length: int | None = None  # characters
    has_effect: bool = True  # False: valid values are accepted and listed in `stencil.ignored`

    def from_text(self, text: str) -> Value | None:
        """The value of a multipart text part; None: there is none. Raises InvalidRequestError."""
        match self.kind:
            case "string":
                return self._checked(text)
            case "integer" if INTEGER.fullmatch(text):
                return self._checked(int(text))
            case "number" if _DECIMAL.fullmatch(text) or _NOT_FINITE.fullmatch(text):
                return self._checked(float(text))
            case "boolean" if text.lower() in ("true", "false"):
                return text.lower() == "true"
        raise self._invalid_type(f"'{shorten(text)}'")

    def from_json(self, raw: msgspec.Raw) -> Value | None:
        """The value of a JSON member; None for null. Raises InvalidRequestError."""
        if kind := {b"{": "object", b"[": "array"}.get(bytes(memoryview(raw)[:1])):
            raise self._invalid_type(kind)  # not worth decoding: it may hold a million values
        try:
            value: Any = decode_json(raw, object)
        except msgspec.ValidationError as error:  # well-formed, but a number beyond msgspec's range
            raise self._out_of_range() from error
        match self.kind, value:
            case _, None:
                return None
            case ("boolean", bool()) | ("string", str()):
                return self._checked(value)
            case ("integer" | "number", bool()):
                pass
            case "integer", int():
                return self._checked(value)
            case "number", int() | float():
                return self._checked(self._as_float(value))
        raise self._invalid_type(_KIND_OF_JSON[type(value)])

    def schema(self) -> dict[str, Any]:
        """The field's OpenAPI schema."""
        schema: dict[str, Any] = {"type": self.kind, "description": self.meaning}
        limits = {"minimum": self.low, "maximum": self.high, "maxLength": self.max_length, "enum": list(self.choices)}
        return schema | {key: limit for key, limit in limits.items() if limit not in (None, [])}

    def _checked(self, value: Scalar) -> Scalar:
        if isinstance(value, str):
            if self.choices:
                check_choice(self.name, value, self.choices)
            if self.max_length is not None:
                check_length(self.name, value, self.max_length)
        elif isinstance(value, float):
            check_decimal(self.name, value, self.low, self.high)
        elif not isinstance(value, bool):
            check_integer(self.name, value, _as_int(self.low), _as_int(self.high))
        return value

    def _as_float(self, value: float) -> float:
        try:
            return float(value)
        except OverflowError as error:  # an integer of more than 308 digits
            raise self._out_of_range() from error

    def _out_of_range(self) -> InvalidRequestError:
        return InvalidRequestError(f"Invalid '{self.name}': number out of range.", param=self.name)

    def _invalid_type(self, got: str) -> InvalidRequestError:
        article = "an" if self.kind == "integer" else "a"
        message = f"Invalid type for '{self.name}': expected {article} {self.kind}, but got {got} instead."
        return InvalidRequestError(message, param=self.name, code="invalid_type")


def _as_int(bound: float | None) -> int | None:
    return None if bound is None else int(bound)

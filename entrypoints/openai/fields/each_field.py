"""EachField: a field of all control pictures of a request, or of each of them: one value, or a JSON array of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import msgspec

from core.control import MAX_CONTROLS
from core.errors import InvalidRequestError
from entrypoints.openai.fields.field import Field, Scalar, decode_json

MAX_JSON_BYTES = 64 * 1024
"""More than MAX_CONTROLS values need."""


@dataclass(frozen=True)
class EachField(Field):
    """Its values are tuples. One value stands for all pictures."""

    def from_text(self, text: str) -> tuple[Scalar, ...] | None:
        """The value of a multipart text part; an array as JSON. Raises InvalidRequestError."""
        if text.startswith("["):
            return self._from_array(text.encode("utf-8", "replace"))
        return self._one(super().from_text(text))

    def from_json(self, raw: msgspec.Raw) -> tuple[Scalar, ...] | None:
        """The value of a JSON member; None for null. Raises InvalidRequestError."""
        data = bytes(memoryview(raw)[: MAX_JSON_BYTES + 1])
        return self._from_array(data) if data[:1] == b"[" else self._one(super().from_json(raw))

    def _from_array(self, data: bytes) -> tuple[Scalar, ...]:
        if len(data) > MAX_JSON_BYTES:
            message = f"Invalid '{self.name}': array too long; {MAX_CONTROLS} control pictures need less."
            raise InvalidRequestError(message, param=self.name, code="array_above_max_length")
        try:
            members = decode_json(data, list[msgspec.Raw])
        except InvalidRequestError as error:
            raise InvalidRequestError(f"Invalid '{self.name}': expected JSON.", param=self.name) from error
        if not 1 <= len(members) <= MAX_CONTROLS:
            message = f"Invalid '{self.name}': expected 1 to {MAX_CONTROLS} values, but got {len(members)} instead."
            raise InvalidRequestError(message, param=self.name, code="array_above_max_length")
        return tuple(map(self._member, members))

    def _member(self, raw: msgspec.Raw) -> Scalar:
        value = super().from_json(raw)
        if value is None:
            raise self._invalid_type("null")
        return cast(Scalar, value)

    @staticmethod
    def _one(value: Any) -> tuple[Scalar, ...] | None:
        return None if value is None else (value,)

    def schema(self) -> dict[str, Any]:
        """The field's OpenAPI schema."""
        one = super().schema()
        meaning = one.pop("description")
        several = {"type": "array", "items": one, "maxItems": MAX_CONTROLS}
        return {"description": meaning, "oneOf": [one, several]}

"""LoraField: the field `lora`, which names adapters: as text, or as JSON also in a form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidRequestError
from core.lora import MAX_LORAS, MAX_NAME_CHARACTERS, MAX_SCALE, Lora, named_loras
from entrypoints.openai.fields.field import Field, decode_json

MAX_JSON_BYTES = 64 * 1024
"""More than MAX_LORAS names of MAX_NAME_CHARACTERS need, all of them escaped."""


@dataclass(frozen=True)
class LoraField(Field):
    """Its values are tuples of Lora."""

    def from_text(self, text: str) -> tuple[Lora, ...]:
        """The value of a multipart text part: a name, or JSON. The names of adapters do not begin as objects and arrays
        do. Raises InvalidRequestError."""
        return self._from_json(text.encode("utf-8", "replace")) if text[:1] in ("{", "[") else named_loras(text)

    def from_json(self, raw: msgspec.Raw) -> tuple[Lora, ...]:
        """The value of a JSON member. Raises InvalidRequestError."""
        return self._from_json(bytes(memoryview(raw)))

    def _from_json(self, data: bytes) -> tuple[Lora, ...]:
        if len(data) > MAX_JSON_BYTES:
            message = f"Invalid '{self.name}': {len(data)} bytes are more than {MAX_LORAS} adapters need."
            raise InvalidRequestError(message, param=self.name, code="string_above_max_length")
        try:
            return named_loras(decode_json(data, object))
        except msgspec.ValidationError as error:  # well-formed, but a number beyond msgspec's range
            raise self._out_of_range() from error
        except InvalidRequestError as error:
            if error.param is not None:
                raise
            raise InvalidRequestError(f"Invalid '{self.name}': {error.message}", param=self.name) from error

    def schema(self) -> dict[str, Any]:
        """The field's OpenAPI schema."""
        name = {"type": "string", "maxLength": MAX_NAME_CHARACTERS}
        scale = {"type": "number", "minimum": -MAX_SCALE, "maximum": MAX_SCALE, "default": 1.0}
        one = [name, {"type": "object", "properties": {"name": name, "scale": scale}, "required": ["name"]}]
        several = {"type": "array", "items": {"oneOf": one}, "maxItems": MAX_LORAS}
        return {"description": self.meaning, "oneOf": [*one, several]}

"""ClassField: the field `class_label`: the number of a class, or its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from core.validation import check_length
from entrypoints.openai.fields.field import INTEGER, Field, Value, decode_json

MAX_NAME_CHARACTERS = 512


@dataclass(frozen=True)
class ClassField(Field):
    """Its values are integers and strings. Digits are a number, also as text."""

    def from_text(self, text: str) -> Value | None:
        """The value of a multipart text part. Raises InvalidRequestError."""
        if INTEGER.fullmatch(text):
            return super().from_text(text)
        check_length(self.name, text, MAX_NAME_CHARACTERS)
        return text

    def from_json(self, raw: msgspec.Raw) -> Value | None:
        """The value of a JSON member; None for null. Raises InvalidRequestError."""
        is_text = bytes(memoryview(raw)[:1]) == b'"'
        return self.from_text(decode_json(raw, str)) if is_text else super().from_json(raw)

    def schema(self) -> dict[str, Any]:
        """The field's OpenAPI schema."""
        number, name = {"type": "integer", "minimum": 0}, {"type": "string", "maxLength": MAX_NAME_CHARACTERS}
        return {"description": self.meaning, "oneOf": [number, name]}

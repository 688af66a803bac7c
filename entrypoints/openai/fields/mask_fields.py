"""PointsField and BoxField: places in a picture, as JSON arrays of numbers, in a form as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidRequestError
from core.selection import MAX_POINTS
from entrypoints.openai.fields.field import Field, decode_json

MAX_JSON_BYTES = 64 * 1024
"""More than MAX_POINTS points need."""

NOTHING = (b"", b"null")
"""Texts of a field that is not given: forms send those that nobody has filled in, too."""


@dataclass(frozen=True)
class PointsField(Field):
    """Its values are tuples of PixelPoint."""

    def from_text(self, text: str) -> tuple[tuple[float, ...], ...] | None:
        return self.from_json(msgspec.Raw(text.encode("utf-8", "replace")))

    def from_json(self, raw: msgspec.Raw) -> tuple[tuple[float, ...], ...] | None:
        data = bytes(memoryview(raw)).strip()
        return None if data in NOTHING else self._from_json(data)

    def _from_json(self, data: bytes) -> tuple[tuple[float, ...], ...]:
        expected = "an array of points, each [x, y] or [x, y, -1]"
        points: tuple[tuple[float, ...], ...] = _decoded(self.name, data, tuple[tuple[float, ...], ...], expected)
        return points

    def schema(self) -> dict[str, Any]:
        """The field's OpenAPI schema."""
        point = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3}
        return {"type": "array", "items": point, "maxItems": MAX_POINTS, "description": self.meaning}


@dataclass(frozen=True)
class BoxField(Field):
    """Its values are tuples of left, top, right and bottom."""

    def from_text(self, text: str) -> tuple[float, float, float, float] | None:
        return self.from_json(msgspec.Raw(text.encode("utf-8", "replace")))

    def from_json(self, raw: msgspec.Raw) -> tuple[float, float, float, float] | None:
        data = bytes(memoryview(raw)).strip()
        return None if data in NOTHING else self._from_json(data)

    def _from_json(self, data: bytes) -> tuple[float, float, float, float]:
        expected = "an array of left, top, right, bottom"
        box: tuple[float, float, float, float] = _decoded(self.name, data, tuple[float, float, float, float], expected)
        return box

    def schema(self) -> dict[str, Any]:
        """The field's OpenAPI schema."""
        numbers = {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
        return numbers | {"description": self.meaning}


def _decoded(name: str, data: bytes, kind: Any, expected: str) -> Any:
    """A JSON value of this kind. Raises InvalidRequestError."""
    if len(data) > MAX_JSON_BYTES:
        message = f"Invalid '{name}': {len(data)} bytes are more than {MAX_POINTS} points need."
        raise InvalidRequestError(message, param=name, code="string_above_max_length")
    try:
        return decode_json(data, kind)
    except msgspec.ValidationError as error:
        message = f"Invalid type for '{name}': expected {expected}, in pixels."
        raise InvalidRequestError(message, param=name, code="invalid_type") from error
    except InvalidRequestError as error:
        message = f"Invalid '{name}': expected {expected}, as JSON."
        raise InvalidRequestError(message, param=name) from error

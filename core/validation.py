"""Range checks of request fields: each raises InvalidRequestError with the code and wording of the OpenAI API."""

from __future__ import annotations

import math
from collections.abc import Sequence

from core.errors import InvalidRequestError


def check_integer(name: str, value: int, low: int | None = None, high: int | None = None) -> None:
    """`low` <= value <= `high`, or ``integer_below_min_value`` / ``integer_above_max_value``."""
    _check_bounds("integer", name, value, low, high)


def check_decimal(name: str, value: float, low: float | None = None, high: float | None = None) -> None:
    """Finite and `low` <= value <= `high`, or ``invalid_value`` / ``decimal_(below_min|above_max)_value``."""
    if not math.isfinite(value):
        raise InvalidRequestError(f"Invalid '{name}': expected a finite number, but got {value} instead.", param=name)
    _check_bounds("decimal", name, value, low, high)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """`value` is one of `choices`, or ``invalid_value``."""
    if value not in choices:
        listed = ", ".join(f"'{choice}'" for choice in choices)
        message = f"Invalid value: '{shorten(value)}'. Supported values are: {listed}."
        raise InvalidRequestError(message, param=name)


def check_length(name: str, value: str, high: int) -> None:
    """At most `high` characters, or ``string_above_max_length``."""
    if len(value) > high:
        message = (
            f"Invalid '{name}': string too long. "
            f"Expected a string with maximum length {high}, but got a string with length {len(value)} instead."
        )
        raise InvalidRequestError(message, param=name, code="string_above_max_length")


def shorten(value: str, length: int = 80) -> str:
    """`value` as an error message quotes it."""
    return value if len(value) <= length else value[:length] + "..."


def _check_bounds(kind: str, name: str, value: float, low: float | None, high: float | None) -> None:
    if low is not None and value < low:
        _raise_bound(f"{kind}_below_min_value", f"{kind} below minimum value", name, f">= {low}", value)
    if high is not None and value > high:
        _raise_bound(f"{kind}_above_max_value", f"{kind} above maximum value", name, f"<= {high}", value)


def _raise_bound(code: str, what: str, name: str, bound: str, value: float) -> None:
    message = f"Invalid '{name}': {what}. Expected a value {bound}, but got {value} instead."
    raise InvalidRequestError(message, param=name, code=code)

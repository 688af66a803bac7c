"""Validation of values from outside: each check raises InvalidRequestError that names the field.

Types are checked against annotations (`conform`, `conformed`), because neither Structs nor dataclasses check them when
created; ranges are checked one by one, with the codes and wording of the OpenAI API.
"""

from __future__ import annotations

import functools
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from core.errors import InvalidRequestError

_NEVER_CONVERTED = (int, float, bool, type(None))
_SCALARS = (int, float, bool, str, type(None))
_MAX_SHOWN_BITS = 256


def conform(new: Any) -> None:
    """Check every field of a Struct or dataclass against its annotation; to be called first in its ``__post_init__``.

    Values are replaced by what `conformed` returns, also in a frozen object. If all values have exactly the annotated
    types, as in a decoded message, this costs one dictionary look-up.
    """
    kind = typing.cast(Any, type(new))
    if not isinstance(new, msgspec.Struct):
        _conform_each(new, kind, object.__setattr__)
    elif not _are_exact(kind, tuple(map(type, msgspec.structs.astuple(new)))):
        _conform_each(new, kind, msgspec.structs.force_setattr)


def conformed(name: str, value: object, annotation: Any) -> Any:
    """`value` as an `annotation`, or InvalidRequestError (``invalid_type``) with `name` as its param.

    Strict: a whole float is not an integer, a bool is not a number, and text must be encodable as UTF-8. NumPy scalars,
    and instances of subclasses of int, float and str, become Python's own; an integer becomes a float and a list a
    tuple where that is annotated. Unions with classes other than Python's own scalars are checked by class only.
    """
    classes = _classes(annotation)
    if classes is not None:
        if isinstance(value, classes):
            return value
        expected = " | ".join(one.__name__ for one in classes if one is not type(None))
        raise _invalid_type(name, f"expected `{expected}`, got `{type(value).__name__}`")
    try:
        plain = _plain(value)
        if typing.get_origin(annotation) is typing.Literal and isinstance(plain, str):
            check_choice(name, plain, typing.get_args(annotation))
        return msgspec.convert(plain, annotation)
    # ValidationError and UnicodeEncodeError are ValueErrors. msgspec takes any object with __getitem__ for a mapping,
    # NumPy's scalars too, and fails at their missing keys().
    except (ValueError, RecursionError, AttributeError) as error:
        raise _invalid_type(name, str(error)) from error


def _conform_each(new: Any, kind: Any, store: Callable[[Any, str, Any], None]) -> None:
    for name, exact, annotation in _fields(kind):
        value = getattr(new, name)
        if type(value) not in exact:
            store(new, name, conformed(name, value, annotation))


@functools.lru_cache(maxsize=1024)
def _are_exact(kind: Any, value_types: tuple[type, ...]) -> bool:
    """Whether values of these types, one for each field of a class, need no further check."""
    return all(one in exact for one, (_, exact, _) in zip(value_types, _fields(kind), strict=True))


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, frozenset[type], Any], ...]:
    """(name, types that need no conversion, annotation) of each field of a Struct class or dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else kind.__dataclass_fields__
    return tuple((name, _exact_types(hints[name]), hints[name]) for name in names)


def _exact_types(annotation: Any) -> frozenset[type]:
    """Types that need no conversion. Never str: it may contain half a surrogate pair."""
    return frozenset(one for one in _members(annotation) if one in _NEVER_CONVERTED)


def _members(annotation: Any) -> tuple[Any, ...]:
    """The annotations that a union allows, else the annotation alone. Names that Python 3.12's `type` statement gives,
    as NumPy 2.5 does with NDArray, are replaced by what they stand for."""
    origin = typing.get_origin(annotation)
    if hasattr(named := origin or annotation, "__value__"):
        return _members(named.__value__)
    if origin not in (typing.Union, types.UnionType):
        return (annotation,)
    return tuple(member for one in typing.get_args(annotation) for member in _members(one))


@functools.cache
def _classes(annotation: Any) -> tuple[type, ...] | None:
    """The classes of a union that msgspec cannot distinguish; None for annotations that it can check."""
    classes = tuple(typing.get_origin(one) or one for one in _members(annotation))
    others = [one for one in classes if isinstance(one, type) and one not in (*_SCALARS, tuple, dict)]
    return classes if others else None


def _plain(value: object) -> object:
    """NumPy scalars and instances of subclasses of built-in types as Python's own, also in a list, tuple or dict."""
    match value:
        case bool() | None | np.timedelta64():  # the last one is an np.integer, but not a number
            return value
        case np.bool_():
            return bool(value)
        case int():
            return int.__int__(value)
        case np.integer():
            return int(value)
        case float():
            return float.__float__(value)
        case np.floating():
            return float(value)
        case str():
            text = str.__str__(value)
            text.encode()  # raises UnicodeEncodeError
            return text
        case list() | tuple():
            return [_plain(one) for one in value]
        case dict():
            return {_plain(key): _plain(one) for key, one in value.items()}
    return value


def _invalid_type(name: str, why: str) -> InvalidRequestError:
    message = f"Invalid type for '{name}': {why[:1].lower()}{why[1:]}."
    return InvalidRequestError(message, param=name, code="invalid_type")


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


def check_matches(name: str, value: str, pattern: str, expected: str) -> None:
    """`value` fully matches a regular expression, or ``invalid_value``; expected: the allowed values in words."""
    if not re.fullmatch(pattern, value):
        raise InvalidRequestError(f"Invalid value: '{shorten(value)}'. Supported values are: {expected}.", param=name)


def check_filled(name: str, value: str) -> None:
    """Not empty, or ``empty_string``."""
    if not value:
        message = f"Invalid '{name}': empty string. Expected a string with minimum length 1."
        raise InvalidRequestError(message, param=name, code="empty_string")


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
    message = f"Invalid '{name}': {what}. Expected a value {bound}, but got {_shown(value)} instead."
    raise InvalidRequestError(message, param=name, code=code)


def _shown(value: float) -> str:
    """`value` as an error message quotes it. Python does not print integers of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    return str(value)

"""Values of workflows of users' classes, as callers give and get them, and as arrays in shared memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import InvalidRequestError
from core.graph.form import Form

RunValue = bool | int | float | str | npt.NDArray[Any]
"""bool, int, float or str where that is declared; a picture is uint8 [height, width, 3], a tensor as declared."""

_SCALARS: dict[str, tuple[type, ...]] = {"truth": (bool,), "integer": (int,), "number": (float, int), "text": (str,)}
"""Kind of a form -> types of its values; all others are arrays."""


def to_array(name: str, form: Form, value: object) -> npt.NDArray[Any]:
    """A value as an array. Raises InvalidRequestError, with `name` as its param, for one that is not of its form."""
    value = value.item() if isinstance(value, np.generic) else value
    types = _SCALARS.get(form.kind, (np.ndarray,))
    if not isinstance(value, types) or (isinstance(value, bool) and form.kind != "truth"):
        raise _refuse(name, f"it is a {type(value).__name__}, and {form} is declared")
    try:
        array = _array(form, value)
    except (OverflowError, UnicodeEncodeError) as error:
        raise _refuse(name, f"it is no {form}: {error}") from error
    if problem := form.why_not(array.shape, array.dtype.name):
        raise _refuse(name, problem)
    return array


def from_array(form: Form, array: npt.NDArray[Any]) -> RunValue:
    """The value that an array is. array: of this form; not copied."""
    match form.kind:
        case "truth" | "integer" | "number":
            scalar: bool | int | float = array.item()
            return scalar
        case "text":
            return array.tobytes().decode()
        case "picture" | "tensor":
            return array


def array_at(form: Form, place: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The array of a form whose bytes are at the start of a place. place: uint8 [at least its bytes]."""
    dtype = np.dtype(form.dtype)
    return place[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _array(form: Form, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.uint8)
    return value if isinstance(value, np.ndarray) else np.array(value, form.dtype)


def _refuse(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{name}': {problem}.", param=name)

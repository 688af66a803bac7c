"""Values of workflows of users' classes, as callers give and get them, and as arrays in shared memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import InvalidRequestError
from core.graph.form import Form

RunValue = bool | int | float | str | npt.NDArray[Any]
"""bool, int, float or str where that is declared; a picture is uint8 [height, width, 3], a tensor as declared. Numbers
are finite."""


def to_array(name: str, form: Form, value: object) -> npt.NDArray[Any]:
    """A value as an array whose bytes are in order, a copy only where they are not yet. Raises InvalidRequestError,
    with `name` as its param, for one that is not of its form.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if problem := form.why_not_plain(value) if form.is_plain else _why_not_array(form, value):
        raise InvalidRequestError(f"Invalid '{name}': {problem}.", param=name)
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.uint8)
    return np.asarray(value, form.dtype, order="C")


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


def _why_not_array(form: Form, value: object) -> str:
    if not isinstance(value, np.ndarray):
        return f"it is a {type(value).__name__}, and {form} is declared"
    if problem := form.why_not(value.shape, value.dtype.name):
        return problem
    return "" if value.dtype.kind != "f" or np.isfinite(value).all() else "not all of its numbers are finite"

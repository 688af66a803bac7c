"""Values of users' classes as answers show them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.client.run_values import RunValue


def shown_values(values: Mapping[str, RunValue]) -> dict[str, Any]:
    """Name -> value for JSON. An array is an object with its dtype, its shape, and its bytes (little-endian, row by
    row) in base64.
    """
    return {name: _shown(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


def _shown(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    data = np.ascontiguousarray(array).tobytes()
    return {"dtype": array.dtype.name, "shape": array.shape, "base64": b64encode(data).decode()}

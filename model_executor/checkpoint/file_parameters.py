"""Reads from a weight file's header which tensors are in it, their bytes once they are loaded, and how many parameters
they are, also where these are quantised: torchao stores a weight as several tensors and lists them in the header
(`torchao.prototype.safetensors`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from core.errors import ConfigError

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtype in a header that `--dtype` replaces -> its bytes."""

OTHERS = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
"""Dtype that stays -> its bytes; 1 where it is not listed."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file, as the header describes it."""

    name: str
    shape: list[int]
    dtype: str  # as safetensors spells it


def stored_tensors(file: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file. Raises ConfigError if it cannot be read."""
    return _read_header(file)[0]


def loaded_bytes(file: Path, itemsize: int, matrix_itemsize: float | None = None, *, is_quantized: bool = False) -> int:
    """Bytes that a file's tensors take at least once they are loaded. itemsize: of the dtype that they are served in.
    matrix_itemsize: of the weights of linear layers, if these are quantised while they are loaded. is_quantized:
    whether the file's own weights are. Raises ConfigError if it cannot be read."""
    total = 0.0
    for tensor in stored_tensors(file):
        own = FLOATS.get(tensor.dtype)
        if own is None:
            size: float = OTHERS.get(tensor.dtype, 1)
        elif is_quantized:
            size = min(own, itemsize)  # packages keep some numbers as they are
        else:
            size = matrix_itemsize if matrix_itemsize is not None and len(tensor.shape) == 2 else itemsize
        total += prod(tensor.shape) * size
    return int(total)


def count_file(file: Path) -> int:
    """Parameters in a safetensors file. Raises ConfigError if it cannot be read."""
    tensors, header = _read_header(file)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for weight in json.loads(header.get("tensor_names", "[]")):
        _join(weight, json.loads(header[weight]), shapes)
    return sum(map(prod, shapes.values()))


def _read_header(file: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a file, and the header's other entries."""
    try:
        with safe_open(file, "np") as tensors:  # for PyTorch it maps writable memory, and large files have no room then
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            stored = [StoredTensor(name, each.get_shape(), each.get_dtype()) for name, each in slices.items()]
            return stored, tensors.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


def _join(weight: str, entry: Mapping[str, Any], shapes: dict[str, list[int]]) -> None:
    """Replace the tensors that torchao made of a weight by the weight, in `shapes`. entry: its entry in the header; a
    shape there means that numbers are packed."""
    module, _, name = weight.rpartition(".")
    parts = {part: shapes.pop(f"{module}._{name}_{part}", None) for part in entry.get("_tensor_data_names", ())}
    if (numbers := parts.get("qdata")) is not None:
        shapes[weight] = entry["_data"].get("shape", numbers)

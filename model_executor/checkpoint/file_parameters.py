"""Counts the parameters of a weight file from its header, also where they are quantised: torchao stores a weight as
several tensors and lists them in the header (`torchao.prototype.safetensors`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from core.errors import ConfigError


def count_file(file: Path) -> int:
    """Parameters in a safetensors file. Raises ConfigError if it cannot be read."""
    try:
        with safe_open(file, "pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
            header = tensors.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    for weight in json.loads(header.get("tensor_names", "[]")):
        _join(weight, json.loads(header[weight]), shapes)
    return sum(map(prod, shapes.values()))


def _join(weight: str, entry: Mapping[str, Any], shapes: dict[str, list[int]]) -> None:
    """Replace the tensors that torchao made of a weight by the weight, in `shapes`. entry: its entry in the header; a
    shape there means that numbers are packed."""
    module, _, name = weight.rpartition(".")
    parts = {part: shapes.pop(f"{module}._{name}_{part}", None) for part in entry.get("_tensor_data_names", ())}
    if (numbers := parts.get("qdata")) is not None:
        shapes[weight] = entry["_data"].get("shape", numbers)

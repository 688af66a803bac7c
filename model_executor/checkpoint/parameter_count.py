"""Counts the parameters of a checkpoint's part from the headers of its weight files, also where they are quantised.

torchao stores a weight as several tensors and lists them in the header (`torchao.prototype.safetensors`). Checkpoints
quantised with other methods do not get here: `describe` opens checkpoints for the CPU, where they are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from core.config import Quantization
from core.errors import ConfigError
from model_executor.checkpoint.loader import Checkpoint
from model_executor.checkpoint.quantization import QUANTIZED
from model_executor.checkpoint.weights import usual_variant, weight_files

BYTES_PER_WEIGHT: dict[Quantization, float | None] = {
    "none": None,
    "torchao-int8": 1.0,
    "bitsandbytes-8bit": 1.0,
    "bitsandbytes-4bit": 0.5,
}
"""Of a denoiser's weights when they are quantised; None: as of their dtype."""


def count_parameters(folder: Path) -> int:
    """Parameters in a part's folder, counting one variant. Raises ConfigError for a file that cannot be read."""
    return sum(map(_count_file, weight_files(folder, usual_variant(folder, ""))))


def expected_bytes(checkpoint: Checkpoint, part: str) -> int:
    """Bytes that a part will take when it is loaded. Raises ConfigError for a file that cannot be read."""
    folder = checkpoint.path / part
    files = weight_files(folder, usual_variant(folder, checkpoint.variant))
    itemsize = BYTES_PER_WEIGHT[checkpoint.quantization] if part in QUANTIZED else None
    return int(sum(map(_count_file, files)) * (itemsize or checkpoint.dtype.itemsize))


def _count_file(file: Path) -> int:
    try:
        with safe_open(file, "pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
            header = tensors.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    for weight in json.loads(header.get("tensor_names", "[]")):
        _join(weight, json.loads(header[weight]), shapes)
    return sum(map(prod, shapes.values()))


def _join(weight: str, told: Mapping[str, Any], shapes: dict[str, list[int]]) -> None:
    """Replace the tensors that torchao made of a weight by the weight, in `shapes`. told: its entry in the header; a
    shape there means that numbers are packed."""
    module, _, name = weight.rpartition(".")
    parts = {part: shapes.pop(f"{module}._{name}_{part}", None) for part in told.get("_tensor_data_names", ())}
    if (numbers := parts.get("qdata")) is not None:
        shapes[weight] = told["_data"].get("shape", numbers)

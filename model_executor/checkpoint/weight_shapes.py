"""Explains why weights cannot be loaded: finds one whose shape differs from what its part's configuration asks for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import nn


def differing_shape(module: nn.Module, files: Iterable[Path]) -> str | None:
    """A sentence about the first weight whose shape differs from the module's; None if all agree. module: may be
    without weights."""
    wanted = {_name(name): list(tensor.shape) for name, tensor in module.state_dict().items()}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                shape = tensors.get_slice(key).get_shape()
                if (expected := wanted.get(_name(key), shape)) != shape:
                    return (
                        f"{key} in {file.name} is of shape {shape} where config.json asks for {expected}; are both of "
                        "one checkpoint?"
                    )
    return None


def _name(key: str) -> str:
    """A weight's name without the prefix that transformers 5 drops from text encoders."""
    return key.removeprefix("text_model.")

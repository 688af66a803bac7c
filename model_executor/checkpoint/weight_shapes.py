"""Weights whose shapes are not those that a part's configuration asks for, which is why they cannot be loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import nn


def differing_shape(module: nn.Module, files: Iterable[Path]) -> str | None:
    """The first weight that is of another shape than in the module, in a sentence; None where there is none. module:
    without weights will do."""
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
    """Of a text encoder's weight: transformers 5 drops the first name of some."""
    return key.removeprefix("text_model.")

"""Chooses the device of a worker: each takes one GPU, numbered engine by engine.

With W workers per engine, engine i takes GPUs i * W to i * W + W - 1 of those visible to this process, in the order of
CUDA_VISIBLE_DEVICES where that is set.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from core.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def resolve_device(name: str, index: int = 0, num_workers: int = 1) -> torch.device:
    """The device of a worker. `auto` and `cuda` take the GPU at `index`, `auto` the CPU where there is no GPU; `cuda:N`
    takes that one. num_workers: of all engines; each needs a GPU unless one is named. Raises ConfigError.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device(pick_device(name, index, num_workers, num_gpus, os.environ.get(VISIBLE)))


def pick_device(name: str, index: int, num_workers: int, num_gpus: int, visible: str | None) -> str:
    """`resolve_device` as a pure function. num_gpus: GPUs that PyTorch sees. visible: CUDA_VISIBLE_DEVICES. If it
    raises ConfigError for one worker, it does for all, so the first one fails before it loads anything.
    """
    kind, number = _parse(name, num_gpus)
    if kind != "cuda":
        return kind
    seen = f"PyTorch sees {_count(num_gpus)}{_because(visible)}"
    if num_gpus == 0:
        raise ConfigError(f"device {name} was asked for, but {seen}; use --device cpu")
    if number is not None:
        if number >= num_gpus:
            raise ConfigError(f"device {name} was asked for, but {seen}, the last of which is cuda:{num_gpus - 1}")
        return f"cuda:{number}"
    if num_workers > num_gpus:
        raise ConfigError(
            f"{num_workers} workers need a GPU each, but {seen}; give a smaller --data-parallel-size or "
            "--workers-per-engine"
        )
    return f"cuda:{index}"


def _parse(name: str, num_gpus: int) -> tuple[str, int | None]:
    """(type, number or None) of a device name. Raises ConfigError."""
    if name == "auto":
        return "cuda" if num_gpus else "cpu", None
    with suppress(RuntimeError):
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            return device.type, device.index
    raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")


def _count(num_gpus: int) -> str:
    return {0: "no GPU", 1: "one GPU"}.get(num_gpus, f"{num_gpus} GPUs")


def _because(visible: str | None) -> str:
    return "" if visible is None else f" ({VISIBLE}={visible!r})"

"""Which device a worker takes: one each, and engine after engine.

Engine i of W workers takes the GPUs i * W to i * W + W - 1 of those that this process may see: CUDA_VISIBLE_DEVICES,
where it is set, says which these are and in which order.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from core.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def resolve_device(name: str, index: int = 0, num_workers: int = 1) -> torch.device:
    """`auto` takes a GPU when there is one, of several the one at `index`, as does `cuda`. num_workers: of all engines,
    which need a GPU each where none was named. Raises ConfigError.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device(pick_device(name, index, num_workers, num_gpus, os.environ.get(VISIBLE)))


def pick_device(name: str, index: int, num_workers: int, num_gpus: int, visible: str | None) -> str:
    """`resolve_device` without a look at the machine: it has `num_gpus` that PyTorch sees, and CUDA_VISIBLE_DEVICES is
    `visible`. Raises ConfigError, at every worker if at one of them: the first finds out before it loads anything.
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
    """Its type and number. Raises ConfigError."""
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

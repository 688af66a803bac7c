"""Shared parts of the training loops: atomic checkpoints, a moving average of the weights, and a clock.

A loop measures its progress by the time spent training, summed over runs, so that a run which is killed, or stopped and
continued by a signal, resumes where it was. At most LONGEST_STEP is counted between two steps. On a CPU the processor's
time counts, so that a run at the lowest priority, beside other work, takes as many steps as one alone.
"""

import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LONGEST_STEP = 20.0  # seconds


def has_fast_bfloat16(device: torch.device) -> bool:
    """A CPU without AVX-512 emulates bfloat16: a training step takes 17 times as long as in float32."""
    return device.type == "cuda" or torch.backends.cpu.get_cpu_capability() == "AVX512"


def training_device() -> torch.device:
    """A GPU where there is one. cuDNN's attention is switched off: its backward pass reads memory that is not its own
    (PyTorch 2.11, H100, 280 tokens).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def precision(device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 autocast where it is fast; float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16) if has_fast_bfloat16(device) else nullcontext()


class Clock:
    """Counts the seconds spent training. The budget may change between runs."""

    def __init__(self, budget: float, spent: float = 0.0) -> None:
        self.budget, self.spent = budget, spent
        self._now = time.process_time if training_device().type == "cpu" else time.monotonic
        self._last = self._now()

    def tick(self) -> float:
        """Count the time since the last tick; returns the spent share of the budget."""
        now = self._now()
        self.spent += min(now - self._last, LONGEST_STEP)
        self._last = now
        return self.spent / self.budget


class Average:
    """Exponential moving average of modules' weights, in their own dtype."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self.weights = {
            name: {key: value.detach().clone() for key, value in state_of(module).items()}
            for name, module in modules.items()
        }

    @torch.no_grad()
    def update(self, decay: float) -> None:
        for name, module in self._modules.items():
            kept = self.weights[name]
            for key, value in state_of(module).items():
                if value.is_floating_point():
                    kept[key].lerp_(value, 1 - decay)

    def load(self, weights: dict[str, dict[str, Tensor]]) -> None:
        for name, kept in self.weights.items():
            for key, value in kept.items():
                value.copy_(weights[name][key])

    def copy_to(self, modules: dict[str, nn.Module]) -> None:
        for name, module in modules.items():
            load_state(module, self.weights[name])


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's state dict without the name prefixes of torch.compile."""
    return {key.replace("_orig_mod.", ""): value for key, value in module.state_dict().items()}


def load_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    own = module.state_dict()
    module.load_state_dict({key: state[key.replace("_orig_mod.", "")] for key in own})


def save(path: Path, state: dict[str, Any]) -> None:
    """Write to a temporary file and rename it, so that a kill leaves the old checkpoint or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return state


def set_rate(optimisers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate

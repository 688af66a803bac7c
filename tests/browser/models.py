"""The random models that the browser tests serve, made in a process that is forked."""

from __future__ import annotations

from pathlib import Path

from adapters import make_lora

from core.config import EMBEDDED_MODEL
from tools.random_checkpoints import make_klein
from tools.random_controlnets import make_sd_controlnet
from tools.random_unet_checkpoints import make_sd


def make(config: bytes, _fds: list[int]) -> None:
    """Write them to the folder that `config` names; run.js says how they are served."""
    folder = Path(config.decode())
    make_lora(folder / "adapter.safetensors", Path(EMBEDDED_MODEL))
    make_klein(folder / "klein", is_distilled=True)
    make_sd(folder / "sd", native_size=128)
    for seed, name in enumerate(("edges", "depth")):
        make_sd_controlnet(folder / name, seed=seed)

"""Writes small random ControlNets in the diffusers layout, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel

from tools.random_unet_checkpoints import sd_unet

RESIDUAL = 0.3
"""Deviation of the weights of the last layers, which are zeros before a ControlNet is trained."""


def make_sd_controlnet(path: Path, *, seed: int = 0, width: int = 24, **unet: Any) -> Path:
    """Write a ControlNet of `make_sd` with random weights to `path`, and return `path`. unet: options of that UNet."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = ControlNetModel.from_unet(sd_unet(4, width, **unet), load_weights_from_unet=False)
        return _saved(net, path)


def _saved(net: Any, path: Path) -> Path:
    """Write a ControlNet whose layers of zeros get random weights."""
    for parameter in net.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=RESIDUAL)
    net.save_pretrained(path)
    return path

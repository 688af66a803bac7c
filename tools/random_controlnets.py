"""Writes small random ControlNets in the diffusers layout, for tests."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel, ControlNetUnionModel, FluxControlNetModel, SD3ControlNetModel

from tools.random_checkpoints import flux_transformer, sd3_transformer
from tools.random_unet_checkpoints import sd_unet, sdxl_unet

RESIDUAL = 0.3
"""Deviation of the weights of the last layers, which are zeros before a ControlNet is trained."""


def make_sd_controlnet(path: Path, *, seed: int = 0, width: int = 24, **unet: Any) -> Path:
    """Write a ControlNet of `make_sd` with random weights to `path`, and return `path`. unet: options of that UNet."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = ControlNetModel.from_unet(sd_unet(4, width, **unet), load_weights_from_unet=False)
        return _saved(net, path)


def make_sdxl_controlnet(path: Path, *, seed: int = 0, width: int = 24, num_modes: int = 0) -> Path:
    """As `make_sd_controlnet`, of `make_sdxl`. num_modes: kinds of pictures of a Union; 0: it is none."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        unet = sdxl_unet(4, width)
        if not num_modes:
            return _saved(ControlNetModel.from_unet(unet, load_weights_from_unet=False), path)
        config, names = dict(unet.config), signature(ControlNetUnionModel.__init__).parameters
        sizes: dict[str, Any] = {
            "num_trans_channel": 16,
            "num_trans_head": 2,
            "num_proj_channel": 16,
            "num_control_type": num_modes,
        }
        sizes["conditioning_embedding_out_channels"] = (8, 8, 16, 16)
        return _saved(ControlNetUnionModel(**({n: config[n] for n in names if n in config} | sizes)), path)


def make_flux_controlnet(
    path: Path, *, seed: int = 0, num_mode: int | None = None, layers: tuple[int, int] = (1, 2), **options: Any
) -> Path:
    """As `make_sd_controlnet`, of `make_flux`. num_mode: kinds of pictures, None for one. layers: double and single
    blocks. options: further fields of its configuration."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = dict(flux_transformer(64, guidance_embeds=True, in_channels=64).config)
        names = signature(FluxControlNetModel.__init__).parameters
        own = {"num_layers": layers[0], "num_single_layers": layers[1], "num_mode": num_mode} | options
        return _saved(FluxControlNetModel(**({name: config[name] for name in names if name in config} | own)), path)


def make_sd3_controlnet(path: Path, *, seed: int = 0, num_layers: int = 2, **options: Any) -> Path:
    """As `make_sd_controlnet`, of `make_sd3`. options: further fields of its configuration."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = dict(sd3_transformer(64, 48).config)
        names = signature(SD3ControlNetModel.__init__).parameters
        own = {"num_layers": num_layers, "dual_attention_layers": ()} | options
        return _saved(SD3ControlNetModel(**({name: config[name] for name in names if name in config} | own)), path)


def _saved(net: Any, path: Path) -> Path:
    """Write a ControlNet whose layers of zeros get random weights."""
    for parameter in net.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=RESIDUAL)
    net.save_pretrained(path)
    return path

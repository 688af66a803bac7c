"""Small random models with ControlNets, for an engine that several tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from adapters import make_lora
from diffusers import AutoencoderKL, ControlNetModel, EulerDiscreteScheduler

from core.config import AdapterConfig, ControlNetConfig, ModelConfig, RequestDefaults
from tools.random_checkpoints import make_flux
from tools.random_controlnets import make_flux_controlnet, make_sd_controlnet, make_sdxl_controlnet
from tools.random_unet_checkpoints import make_sd, make_sdxl, make_sdxl_refiner

COMMON: dict[str, Any] = {"dtype": "float32", "threads": 1, "cache_dtype": "float32", "cache_keyframes": "per-step"}
UNION = {"canny": 0, "tile": 1}


def make_models(folder: Path) -> Path:
    """Write them to `folder`, and return it. The ControlNet "broken" makes no numbers."""
    make_lora(folder / "hat.safetensors", make_sd(folder / "sd", native_size=128))
    make_flux(folder / "flux", native_size=256, guidance_embeds=True)
    euler: dict[str, Any] = {"scheduler_class": EulerDiscreteScheduler, "native_size": 128}
    vae = AutoencoderKL.from_pretrained(make_sdxl(folder / "sdxl", seed=1, **euler) / "vae")
    make_sdxl_refiner(folder / "refiner", seed=2, vae=vae, **euler)
    for seed, name in enumerate(("edges", "depth", "broken"), 1):
        make_sd_controlnet(folder / name, seed=seed)
    broken = ControlNetModel.from_pretrained(folder / "broken")
    broken.conv_in.bias.data.fill_(torch.nan)
    broken.save_pretrained(folder / "broken")
    make_sdxl_controlnet(folder / "wide")
    make_flux_controlnet(folder / "union", num_mode=2, guidance_embeds=True)
    return folder


def models_in(folder: Path) -> list[ModelConfig]:
    """As an engine serves them."""

    def model(name: str, *nets: str, **options: Any) -> ModelConfig:
        of_union = {"union": UNION}
        controlnets = tuple(ControlNetConfig(net, str(folder / net), of_union.get(net, {})) for net in nets)
        named = {"model": str(folder / name), "served_model_name": name, "controlnets": controlnets}
        return ModelConfig(**named, **COMMON, **options)

    return [
        model("sd", "edges", "depth", "broken", adapters=(AdapterConfig("hat", str(folder / "hat.safetensors")),)),
        model("flux", "union"),
        model("sdxl", "wide", refiner="refiner", defaults=RequestDefaults(refiner_start=0.6)),
        model("refiner"),
    ]

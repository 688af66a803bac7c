"""Models of the families that the engine knows: their nodes are of the engine's own ops.

A workflow of these serves the requests of a model that names it (`ModelConfig.workflow`), with this model's checkpoint,
whatever its family; with `role`, with that of a model which plays it (`ModelConfig.refiner`, `ModelConfig.roles`).
`Flux`, `FluxTextEncoder` and `FluxVAE` are the names in LegoDiffusion's figure 7.
"""

from __future__ import annotations

from entrypoints.workflows.families.control_net import ControlNet
from entrypoints.workflows.families.denoiser import Denoiser
from entrypoints.workflows.families.latents_generator import LatentsGenerator
from entrypoints.workflows.families.lora import LoRA
from entrypoints.workflows.families.noise_prediction import denoise
from entrypoints.workflows.families.text_encoder import TextEncoder
from entrypoints.workflows.families.upscaler import Upscaler
from entrypoints.workflows.families.vae import VAE

Flux, FluxTextEncoder, FluxVAE = Denoiser, TextEncoder, VAE

__all__ = [
    "VAE",
    "ControlNet",
    "Denoiser",
    "Flux",
    "FluxTextEncoder",
    "FluxVAE",
    "LatentsGenerator",
    "LoRA",
    "TextEncoder",
    "Upscaler",
    "denoise",
]

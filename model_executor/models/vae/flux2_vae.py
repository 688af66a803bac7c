"""FLUX.2's VAE, diffusers' `AutoencoderKLFlux2`: encoder and decoder of `AutoencoderKL`, with another scaling."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from model_executor.kernels.cpu_kernels import Kernels
from model_executor.models.latents import PATCH
from model_executor.models.vae.vae import ImageVae


class Flux2Vae(ImageVae):
    """Scales each channel to the denoiser's range with the running mean and variance of a batch norm, which differ
    between the four pixels of a patch, as `Flux2KleinPipeline` does with latents that it has packed into patches."""

    def __init__(self, module: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        super().__init__(module, dtype, device)
        mean, variance = (x.view(1, -1, 1, PATCH, 1, PATCH) for x in (module.bn.running_mean, module.bn.running_var))
        deviation = torch.sqrt(variance + module.config.batch_norm_eps)
        self._mean: Tensor = mean.to(self._device, self.dtype)
        self._deviation: Tensor = deviation.to(self._device, self.dtype)

    def in_bfloat16(self, kernels: Kernels | None) -> Self:
        twin = super().in_bfloat16(kernels)
        twin._mean, twin._deviation = self._mean, self._deviation  # its own are rounded
        return twin

    def _scaled(self, latents: Tensor) -> Tensor:
        scaled: Tensor = (_in_patches(latents) - self._mean) / self._deviation
        return scaled.reshape(latents.shape)

    def _unscaled(self, latents: Tensor) -> Tensor:
        unscaled: Tensor = _in_patches(latents) * self._deviation + self._mean
        return unscaled.reshape(latents.shape).to(self._computes_in)


def _in_patches(latents: Tensor) -> Tensor:
    """[1, channels, rows, columns] -> [1, channels, rows / 2, 2, columns / 2, 2]."""
    _, channels, rows, columns = latents.shape
    return latents.reshape(1, channels, rows // PATCH, PATCH, columns // PATCH, PATCH)

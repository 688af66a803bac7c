"""Qwen-Image's VAE, diffusers' `AutoencoderKLQwenImage`: a video VAE, used for one frame.

It normalizes single pixels, so a part of the picture can be decoded from that part and its surroundings, with the same
values. All resolutions but the first, whose attention sees the whole map, are computed for a crop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor, nn

from model_executor.models.boxes import Box, times
from model_executor.models.latents import PATCH
from model_executor.models.vae.vae import Vae, silu_in_place


class QwenVae(Vae):
    """Scales each channel to the denoiser's range with latents_mean and latents_std."""

    def __init__(self, module: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        silu_in_place(module)
        _forget_time(module)
        super().__init__(module, dtype, device)
        config = module.config
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (config.latents_mean, config.latents_std))
        self._mean, self._inverse_std = (x.to(self._device, self.dtype) for x in (mean, 1.0 / std))
        self._halo = _halo(module.decoder)

    @staticmethod
    def scale_and_channels(config: Mapping[str, Any]) -> tuple[int, int]:
        return 2 ** len(config["temperal_downsample"]), config["z_dim"]

    def _moments(self, image: Tensor) -> Tensor:
        parameters: Tensor = self._module.encode(image[:, :, None]).latent_dist.parameters
        return parameters

    def _scaled(self, latents: Tensor) -> Tensor:
        return (latents[:, :, 0] - self._mean) * self._inverse_std

    def _decode(self, latents: Tensor) -> Tensor:
        return self._finish(self._first_map(latents))

    def _decode_region(self, latents: Tensor, tokens: Box, grid: tuple[int, int]) -> Tensor:
        left, top, right, bottom = inside = times(tokens, PATCH)
        rows, columns = latents.shape[2:]
        halo = self._halo
        x, y = max(left - halo, 0), max(top - halo, 0)
        crop = self._first_map(latents)[..., y : min(bottom + halo, rows), x : min(right + halo, columns)]
        pixels = self._finish(crop)
        left, top, right, bottom = times((inside[0] - x, inside[1] - y, inside[2] - x, inside[3] - y), self._scale)
        return pixels[:, :, top:bottom, left:right]

    @property
    def _scale(self) -> int:
        return self.scale_and_channels(self._module.config)[0]

    def _first_map(self, latents: Tensor) -> Tensor:
        """The decoder's map before its first up block, [1, channels, 1, rows, columns]."""
        decoder, latents = self._module.decoder, (latents / self._inverse_std + self._mean).to(self._computes_in)
        first: Tensor = decoder.mid_block(decoder.conv_in(self._module.post_quant_conv(latents[:, :, None])))
        return first

    def _finish(self, x: Tensor) -> Tensor:
        decoder = self._module.decoder
        for block in decoder.up_blocks:
            x = block(x)
        pixels: Tensor = decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))
        return pixels[:, :, 0].clamp(-1.0, 1.0).to(self.dtype)


def _forget_time(module: nn.Module) -> None:
    """Reduce causal convolutions to their last slice in time: with one frame, the other two meet only zeros. A third of
    the products and of the weights is left."""
    for layer in module.modules():
        if isinstance(layer, QwenImageCausalConv3d) and layer.weight.shape[2] > 1:
            layer.weight = nn.Parameter(layer.weight[:, :, -1:].clone(), requires_grad=False)
            layer._padding = (*layer._padding[:4], 0, 0)


def _halo(decoder: Any) -> int:
    """How many latent pixels around a box the box's pixels depend on, counted from the first up block."""
    reach = 1
    for block in reversed(decoder.up_blocks):
        if block.upsamplers:
            reach = -(-(reach + 1) // 2)
        reach += 2 * len(block.resnets)
    return reach

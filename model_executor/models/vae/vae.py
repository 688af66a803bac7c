"""The VAE interface of model families, and its implementation for diffusers' `AutoencoderKL`: pictures to latents in
the denoiser's range, and back, whole or in part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn

from model_executor.host_weights import ON_DEVICE, HostWeights, Weights
from model_executor.kernels.cpu_kernels import Kernels
from model_executor.models.boxes import Box, times
from model_executor.models.last import Last
from model_executor.models.vae.picture_key import PictureKey
from model_executor.models.vae.vae_region import RegionDecoder
from model_executor.models.vae.vae_resnets import fuse


class Vae(ABC):
    """Pictures are float [1, 3, height, width], about -1..1; latents [1, channels, height / scale, width / scale].

    module: the diffusers VAE; its weights must not change afterwards. dtype: of pictures and latents, in which noise is
    drawn; by default the module's, in which it encodes. device: of pictures and latents; by default the module's.
    """

    def __init__(self, module: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        self._module = module
        self.dtype: torch.dtype = dtype or module.dtype
        self._device: torch.device = device or module.device
        self.weights: Weights = ON_DEVICE
        self._in_bfloat16: dict[Kernels | None, Self] = {}
        self._computes_in: torch.dtype = module.dtype  # kept, because diffusers searches all modules for it
        # Each at 1024x1024 pixels, 16 channels and half precision: 2.5 MB of the device's memory, 3 or 4 of the host's.
        self._last: Last[PictureKey, DiagonalGaussianDistribution] = Last()
        self._last_masked: Last[PictureKey, DiagonalGaussianDistribution] = Last()

    def in_bfloat16(self, kernels: Kernels | None) -> Self:
        """The same VAE computing in bfloat16, with pictures and latents in its dtype; made once. kernels: those that
        it may use."""
        if kernels is None and self._computes_in == torch.bfloat16:
            return self
        if kernels not in self._in_bfloat16:
            module = copied_in_bfloat16(self._module)
            if kernels is not None:
                fuse(module, kernels)
            self._in_bfloat16[kernels] = type(self)(module, self.dtype, self._device)
        return self._in_bfloat16[kernels]

    def keep_on_host(self) -> None:
        """Have the weights in host memory while nothing is encoded or decoded. Raises as `HostWeights`."""
        self.weights = HostWeights(self._used_modules, self._device)

    @property
    def _used_modules(self) -> Sequence[nn.Module]:
        """All modules with weights that are computed with."""
        return (self._module,)

    @staticmethod
    @abstractmethod
    def scale_and_channels(config: Mapping[str, Any]) -> tuple[int, int]:
        """(pixels per side of a latent pixel, channels of the latents), from the VAE's configuration."""

    def encode(self, image: Tensor, generator: torch.Generator | None = None, key: PictureKey | None = None) -> Tensor:
        """Latents sampled from the posterior; without a generator, its mode. key: of the picture that `image` was made
        from; the encoder does not run if the last call with a key was for the same one. None: it always runs."""
        if key is None:
            posterior = self._posterior(image)
        else:
            last = self._last if key.mask is None else self._last_masked
            posterior = last.get(key, lambda: self._posterior(image))
        return self._scaled(posterior.mode() if generator is None else posterior.sample(generator))

    def _posterior(self, image: Tensor) -> DiagonalGaussianDistribution:
        with self.weights.on_device():
            moments = self._moments(image.to(self._computes_in))
        return DiagonalGaussianDistribution(moments.to(self.dtype))

    @abstractmethod
    def _moments(self, image: Tensor) -> Tensor:
        """Mean and log variance of the posterior side by side, [1, 2 * channels, rows, columns]."""

    @abstractmethod
    def _scaled(self, latents: Tensor) -> Tensor:
        """The VAE's latents in the denoiser's range."""

    def decode(self, latents: Tensor) -> Tensor:
        """The whole picture."""
        with self.weights.on_device():
            return self._decode(latents)

    def decode_region(self, latents: Tensor, tokens: Box, grid: tuple[int, int]) -> Tensor:
        """The pixels of a box of tokens. latents: of the whole picture; grid: its tokens as (rows, columns)."""
        with self.weights.on_device():
            return self._decode_region(latents, tokens, grid)

    @abstractmethod
    def _decode(self, latents: Tensor) -> Tensor:
        """`decode`, with the weights on the device."""

    @abstractmethod
    def _decode_region(self, latents: Tensor, tokens: Box, grid: tuple[int, int]) -> Tensor:
        """`decode_region`, with the weights on the device."""


class ImageVae(Vae):
    """diffusers' `AutoencoderKL`, with `RegionDecoder` as its decoder."""

    def __init__(self, module: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        # Convolutions of few channels on large maps: channels last took 0.6 of the time on one core in float32.
        module.to(memory_format=torch.channels_last)
        silu_in_place(module)
        super().__init__(module, dtype, device)
        self._decoder = RegionDecoder(module)
        self._decodes_in: torch.dtype = module.decoder.conv_in.weight.dtype
        self._shift: float = module.config.get("shift_factor") or 0.0

    @property
    def _used_modules(self) -> Sequence[nn.Module]:
        return (self._module, *self._decoder.own_modules)

    @staticmethod
    def scale_and_channels(config: Mapping[str, Any]) -> tuple[int, int]:
        return 2 ** (len(config["block_out_channels"]) - 1), config["latent_channels"]

    def _moments(self, image: Tensor) -> Tensor:
        parameters: Tensor = self._module.encode(image).latent_dist.parameters
        return parameters

    def _scaled(self, latents: Tensor) -> Tensor:
        return (latents - self._shift) * self._module.config.scaling_factor  # type: ignore[no-any-return]

    def _decode(self, latents: Tensor) -> Tensor:
        return self._decoder.decode(self._unscaled(latents)).to(self.dtype)

    def _decode_region(self, latents: Tensor, tokens: Box, grid: tuple[int, int]) -> Tensor:
        region = self._decoder.region(tokens, grid)
        if region is None:
            return cut_tokens(self._decode(latents), tokens, grid)
        return self._decoder.decode_region(self._unscaled(latents), region).to(self.dtype)

    def _unscaled(self, latents: Tensor) -> Tensor:
        unscaled = latents / self._module.config.scaling_factor + self._shift
        return unscaled.to(self._decodes_in)  # type: ignore[no-any-return]


def copied_in_bfloat16(module: nn.Module) -> nn.Module:
    """A copy of a module in bfloat16; weights that are in bfloat16 are shared."""
    shared = {id(weight): weight for weight in module.parameters() if weight.dtype == torch.bfloat16}
    return deepcopy(module, shared).to(torch.bfloat16)


def silu_in_place(module: nn.Module) -> None:
    """Let SiLU work in place, which saves a copy: in these VAEs nothing else reads its input, a norm's output."""
    for activation in (layer for layer in module.modules() if isinstance(layer, nn.SiLU)):
        activation.inplace = True


def cut_tokens(pixels: Tensor, tokens: Box, grid: tuple[int, int]) -> Tensor:
    """The pixels of a box of tokens, of a whole picture with `grid` (rows, columns) of tokens."""
    left, top, right, bottom = times(tokens, pixels.shape[2] // grid[0])
    return pixels[:, :, top:bottom, left:right]

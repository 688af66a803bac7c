"""Group norms of a VAE's maps: their moments over a map or its tiles, and norm and SiLU as one layer.

In bfloat16 on one CPU core, compiled kernels read a map twice and write it once, where PyTorch's two layers read it
three times and write it twice. With them and the fused residual blocks (`vae_resnets.py`), the embedded model encodes
in 0.76 of the time and decodes a region in 0.68 (AMD Zen 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from model_executor.kernels.cpu_kernels import LANES, Kernels, can_normalise


def moments(x: Tensor, num_groups: int, kernels: Kernels | None = None) -> Tensor:
    """Mean of each group's values and of their squares, float32 [2, groups]. x: [1, channels, height, width]."""
    if kernels is not None and can_normalise(x):
        return kernels.moments(x, num_groups, torch.ones(1, 1, dtype=torch.float32))
    x = x.float()
    sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
    return sums.reshape(2, num_groups, -1).sum(2) / (x.numel() // num_groups)


def tile_moments(x: Tensor, num_groups: int, grid: Sequence[int], kernels: Kernels | None = None) -> Tensor:
    """The same for each tile of a map that consists of grid[0] rows and grid[1] columns of square ones: [2, groups,
    rows, columns]."""
    size = x.shape[2] // grid[0]
    if kernels is None or not can_normalise(x):
        values = x.float()
        means = torch.cat([nn.functional.avg_pool2d(each, size) for each in (values, values.square())])
    else:
        means = kernels.tile_sums(x, (size, size)) / size**2
    return means.reshape(2, num_groups, -1, *grid).mean(2)


def weighted_moments(x: Tensor, num_groups: int, weights: Tensor, kernels: Kernels | None = None) -> Tensor:
    """The moments of all tiles in sum, each times its weight: float32 [2, groups]. weights: float32 [rows, columns]."""
    if kernels is not None and can_normalise(x):
        return kernels.moments(x, num_groups, weights)
    return (tile_moments(x, num_groups, weights.shape) * weights).sum((2, 3))


def per_channel(moments: Tensor, num_channels: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of a map's groups from their moments [2, groups]: [channels] each."""
    mean, square = moments.repeat_interleave(num_channels // moments.shape[1], dim=1)
    return mean, (square - mean * mean).clamp_min(0.0)


class NormSilu(nn.Module):
    """Group norm and SiLU of a bfloat16 map with one picture."""

    def __init__(self, norm: nn.GroupNorm, kernels: Kernels) -> None:
        super().__init__()
        self.num_groups, self.kernels, self._eps = norm.num_groups, kernels, norm.eps
        self._weight, self._bias = norm.weight.float(), norm.bias.float()

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        return self.at(x, moments(x, self.num_groups, self.kernels))

    def at(self, x: Tensor, moments: Tensor) -> Tensor:
        """With given moments, float32 [2, groups]. x: channels last."""
        return self.kernels.norm_silu(x, moments, self._weight, self._bias, self._eps)


def normed_at(
    norm: nn.GroupNorm | NormSilu, activation: Callable[[Tensor], Tensor], x: Tensor, moments: Tensor
) -> Tensor:
    """Norm and activation of a map with given moments, float32 [2, groups]."""
    if isinstance(norm, NormSilu):
        return norm.at(x, moments)
    mean, variance = per_channel(moments, x.shape[1])
    weight, bias = norm.weight.float(), norm.bias.float()
    batch_norm = nn.functional.batch_norm  # at given statistics: one pass over the map
    return activation(batch_norm(x, mean, variance, weight, bias, eps=norm.eps))


def fuse_norms(vae: nn.Module, kernels: Kernels) -> None:
    """Put `NormSilu` in place of the norms and activations of an `AutoencoderKL` in bfloat16 whose weights do not
    change any more, where their number of channels allows it."""
    for layer in vae.modules():
        if isinstance(layer, ResnetBlock2D):
            _fuse(layer, ("norm1", "norm2"), "nonlinearity", kernels)
        elif hasattr(layer, "conv_norm_out"):
            _fuse(layer, ("conv_norm_out",), "conv_act", kernels)


def _fuse(layer: Any, norms: tuple[str, ...], activation: str, kernels: Kernels) -> None:
    """Fuse these norms of a layer with the activation that follows each."""
    plain = [getattr(layer, name) for name in norms]
    if not isinstance(getattr(layer, activation), nn.SiLU) or not all(map(_is_fusible, plain)):
        return
    for name, norm in zip(norms, plain, strict=True):
        setattr(layer, name, NormSilu(norm, kernels))
    setattr(layer, activation, nn.Identity())


def _is_fusible(norm: nn.Module) -> bool:
    return isinstance(norm, nn.GroupNorm) and norm.num_channels % LANES == 0

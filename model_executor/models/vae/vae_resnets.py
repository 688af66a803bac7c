"""Residual blocks of a VAE in bfloat16 on a CPU: norm and SiLU as one layer; the last convolution adds to its input.

What takes the time at high resolutions is reading and writing maps. Adding within the convolution, and leaving out
diffusers' division by a factor of 1, saves six passes over a map: with the embedded model 0.8 of the time to encode.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from model_executor.kernels.cpu_kernels import Kernels
from model_executor.models.vae.vae_norms import NormSilu, fuse_norms


class FusedResnet(nn.Module):
    """As diffusers' ResnetBlock2D without a time embedding, but overwrites its input, unless that has another number of
    channels."""

    def __init__(self, plain: Any) -> None:
        """plain: whose norms are `NormSilu`; see `_is_fusible`."""
        super().__init__()
        self.norm1, self.conv1, self.norm2, self.conv2 = plain.norm1, plain.conv1, plain.norm2, plain.conv2
        self.conv_shortcut, self.nonlinearity = plain.conv_shortcut, nn.Identity()

    def forward(self, x: Tensor, temb: None = None) -> Tensor:
        """x: bfloat16 [1, channels, height, width], channels last."""
        hidden = self.norm2(self.conv1(self.norm1(x)))
        return self.add_(x if self.conv_shortcut is None else self.conv_shortcut(x), hidden)

    def add_(self, x: Tensor, hidden: Tensor) -> Tensor:
        """x + conv2(hidden), written to x. Both are channels last."""
        assert x.is_contiguous(memory_format=torch.channels_last), "the convolution would write to a copy"
        conv = self.conv2
        add: Tensor = torch.ops.mkldnn._convolution_pointwise_.binary(
            *(x, hidden, conv.weight, conv.bias, conv.padding, conv.stride, conv.dilation, conv.groups),
            *("add", 1.0, None, [], None),
        )
        return add


def add(resnet: ResnetBlock2D | FusedResnet, x: Tensor, hidden: Tensor) -> Tensor:
    """A block's result from its shortcut and the input of its last convolution. May overwrite x."""
    if isinstance(resnet, FusedResnet):
        return resnet.add_(x, hidden)
    summed: Tensor = x + resnet.conv2(hidden)
    return summed


def fuse(vae: nn.Module, kernels: Kernels) -> None:
    """Fuse the norms of an `AutoencoderKL` in bfloat16 whose weights do not change any more, and its residual blocks,
    where their number of channels allows it."""
    fuse_norms(vae, kernels)
    for parent in list(vae.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, ResnetBlock2D) and _is_fusible(layer):
                setattr(parent, name, FusedResnet(layer))


def _is_fusible(layer: ResnetBlock2D) -> bool:
    has_more = layer.upsample is not None or layer.downsample is not None or layer.time_emb_proj is not None
    is_plain = layer.output_scale_factor == 1.0 and layer.dropout.p == 0.0
    return isinstance(layer.norm1, NormSilu) and isinstance(layer.norm2, NormSilu) and is_plain and not has_more

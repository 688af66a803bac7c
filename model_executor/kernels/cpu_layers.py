"""Replaces linear layers and convolutions of a diffusers module on a CPU by faster ones that call oneDNN.

PyTorch multiplies float32 matrices, also those of 1x1 convolutions, with MKL (see `linear.py`), and rearranges a
convolution's weights in every call. On one Zen 5 core, in GFLOP/s: a float32 product of 256 rows, 1280 to 1280 numbers,
86 with MKL and 188 with oneDNN; a convolution of 1280 channels over 16x16 pixels 96, and 211 with weights rearranged
once, in bfloat16 347 and 438.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from model_executor.kernels.linear import has_onednn, is_plain, onednn_product

Layer = nn.Linear | nn.Conv2d


def use_onednn(module: nn.Module) -> None:
    """Replace all plain linear layers and convolutions of a float32 or bfloat16 module on the CPU, in place."""
    if not torch.backends.mkldnn.is_available():
        return
    for name, layer in list(module.named_modules()):
        if isinstance(layer, Layer) and has_onednn(layer.weight) and (fast := _fast(layer)) is not None:
            module.set_submodule(name, fast)


def _fast(layer: Layer) -> nn.Module | None:
    """The replacement of a layer, None for kinds that are not supported."""
    if is_plain(layer):
        return FastLinear(layer)
    if type(layer) is not nn.Conv2d or layer.groups > 1 or layer.dilation != (1, 1) or layer.padding_mode != "zeros":
        return None
    is_point = layer.kernel_size == layer.stride == (1, 1) and layer.padding == (0, 0)
    return PointConv(layer) if is_point else FastConv(layer)


class FastLinear(nn.Module):
    """An `nn.Linear` computed by oneDNN, with the same weight and bias. A row's bits depend on that row alone, where
    `onednn_keeps_rows`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y: Tensor = onednn_product(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])
        return y


class FastConv(nn.Module):
    """An `nn.Conv2d` with weights in oneDNN's order, which replace the original ones; the result has the same bits."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.kernel_size = layer.in_channels, layer.out_channels, layer.kernel_size
        self.stride, self.padding = layer.stride, layer.padding
        self.bias = layer.bias
        self._packed = self._pack(layer)

    def _pack(self, layer: nn.Conv2d) -> Tensor:
        reorder: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
        packed: Tensor = reorder(layer.weight.detach().to_mkldnn(), self.padding, self.stride, layer.dilation, 1)
        return packed

    def forward(self, x: Tensor) -> Tensor:
        """[pictures, in, rows, columns] -> [pictures, out, rows, columns], channels last in memory."""
        places = (self.padding, self.stride, (1, 1), 1)
        y: Tensor = torch.ops.mkldnn._convolution_pointwise(x, self._packed, self.bias, *places, "none", [], "")
        return y


class PointConv(FastConv):
    """A 1x1 convolution, computed as a matrix product. As a convolution in oneDNN's order, some shapes took 50 times as
    long."""

    def _pack(self, layer: nn.Conv2d) -> Tensor:
        return layer.weight.detach().flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """As `FastConv.forward`."""
        pixels = x.permute(0, 2, 3, 1)
        y: Tensor = onednn_product(pixels.flatten(0, 2), self._packed, self.bias).unflatten(0, pixels.shape[:3])
        return y.permute(0, 3, 1, 2)

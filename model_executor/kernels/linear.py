"""Linear layers, computed by the fastest matrix product of the device.

PyTorch multiplies float32 matrices with MKL, which uses slower AVX2 kernels on AMD processors: 98 GFLOP/s where oneDNN
reached 204 on one Zen 5 core; on Intel the two are equal. oneDNN also fuses the activation. With two rows or more, its
result for a row does not depend on the number of other rows, so a request's bits do not depend on its batch; but for
bfloat16 with AMX, see `onednn_keeps_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_executor.cpu import cpu_has_amx

Linear = Callable[..., Tensor]
"""(layer, x [rows, in], gelu=False) -> [rows, out]; gelu applies the tanh approximation to the result."""


def plain_linear(layer: nn.Module, x: Tensor, *, gelu: bool = False) -> Tensor:
    """The layer as PyTorch runs it, bit-identical to diffusers."""
    y: Tensor = layer(x)
    return F.gelu(y, approximate="tanh") if gelu else y


def fused_linear(layer: nn.Module, x: Tensor, *, gelu: bool = False) -> Tensor:
    """Computes a plain `nn.Linear` on a CPU with oneDNN; layers with adapters and quantised layers run as they are."""
    if not is_plain(layer) or not has_onednn(x):
        return plain_linear(layer, x, gelu=gelu)
    return onednn_product(x, layer.weight, layer.bias, gelu=gelu)


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is an `nn.Linear` with ordinary weights; torchao quantises by replacing the layer's weight tensor."""
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


def has_onednn(x: Tensor) -> bool:
    """Whether oneDNN can multiply such matrices: bfloat16 only on processors with AVX-512 or better."""
    if x.device.type != "cpu":
        return False
    return x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and _onednn_has_bfloat16())


@cache
def _onednn_has_bfloat16() -> bool:
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


def onednn_keeps_rows(dtype: torch.dtype) -> bool:
    """Whether a row of oneDNN's products has the same bits whatever the number of rows from two up. With AMX it
    multiplies bfloat16 by other instructions, and in another order, where rows are few."""
    return dtype != torch.bfloat16 or not cpu_has_amx()


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False) -> Tensor:
    """x [rows, in] times weight [out, in], transposed, plus bias [out]. A row's bits depend on that row alone, where
    `onednn_keeps_rows`."""
    if x.shape[0] == 1:  # for a single row oneDNN uses another kernel, which rounds differently
        return onednn_product(x.expand(2, -1), weight, bias, gelu=gelu)[:1]
    activation, algorithm = ("gelu", "tanh") if gelu else ("none", "")
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, activation, [], algorithm)
    return y


def gpu_linear(layer: nn.Module, x: Tensor, *, gelu: bool = False) -> Tensor:
    """Computes a plain `nn.Linear` on a GPU, with the activation fused, before the product is rounded and written;
    layers with adapters and quantised layers run as they are."""
    if not is_plain(layer):
        return plain_linear(layer, x, gelu=gelu)
    return gpu_product(x, layer.weight, layer.bias, gelu=gelu)


def gpu_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    """x [rows, in] times weight [out, in], transposed, plus bias [out]."""
    if gelu and bias is not None:
        y: Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)  # cuBLASLt's is the tanh approximation
        return y
    y = F.linear(x, weight, bias)
    return F.gelu(y, approximate="tanh") if gelu else y


def best_linear() -> Linear:
    """`fused_linear` where PyTorch was built with oneDNN."""
    return fused_linear if torch.backends.mkldnn.is_available() else plain_linear


def as_linear(layer: nn.Module) -> nn.Module:
    """A convolution over patches that do not overlap, as a linear layer over rows of patches, channel by channel, with
    shared weights. Other layers are returned as they are."""
    if not isinstance(layer, nn.Conv2d):
        return layer
    weight = layer.weight.flatten(1)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias, requires_grad=False)
    return linear

"""Linear layers, by the fastest product the machine has.

PyTorch multiplies float32 matrices with MKL, which takes its slower AVX2 kernels on AMD processors: 98 GFLOP/s where
oneDNN reached 204 on one Zen 5 core, and on Intel the two are level. oneDNN also fuses the activation. Its result for a
row does not depend on how many other rows there are as long as there are two, so that a request's bits do not depend on
its batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Linear = Callable[..., Tensor]
"""(layer, x [rows, in], gelu=False) -> [rows, out]; gelu applies the tanh approximation to the result."""


def plain_linear(layer: nn.Module, x: Tensor, *, gelu: bool = False) -> Tensor:
    """The layer as PyTorch runs it: what diffusers computes, bit for bit."""
    y: Tensor = layer(x)
    return F.gelu(y, approximate="tanh") if gelu else y


def fused_linear(layer: nn.Module, x: Tensor, *, gelu: bool = False) -> Tensor:
    """Through oneDNN where the layer is a plain `nn.Linear` on a CPU; adapters and quantised layers run as
    themselves."""
    if type(layer) is not nn.Linear or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return plain_linear(layer, x, gelu=gelu)
    rows = x.shape[0]
    if rows == 1:  # a product with one row takes another kernel, which rounds differently
        x = x.expand(2, -1)
    activation, algorithm = ("gelu", "tanh") if gelu else ("none", "")
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, activation, [], algorithm)
    return y[:rows]


def best_linear() -> Linear:
    """`fused_linear` where PyTorch was built with oneDNN."""
    return fused_linear if torch.backends.mkldnn.is_available() else plain_linear

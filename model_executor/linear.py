"""Linear layers, by the fastest product the machine has.

PyTorch multiplies float32 matrices with MKL, which takes its slower AVX2 kernels on AMD processors: 98 GFLOP/s where
oneDNN reached 204 on one Zen 5 core, and on Intel the two are level. oneDNN also fuses the activation. Its result for a
row does not depend on how many other rows there are as long as there are two, so that a request's bits do not depend on
its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    if type(layer) is not nn.Linear or not has_onednn(x):
        return plain_linear(layer, x, gelu=gelu)
    return onednn_product(x, layer.weight, layer.bias, gelu=gelu)


def has_onednn(x: Tensor) -> bool:
    """Whether oneDNN multiplies matrices like this one."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False) -> Tensor:
    """x [rows, in] times weight [out, in], transposed, plus bias [out]. A row's bits depend on that row alone."""
    rows = x.shape[0]
    if rows == 1:  # a product with one row takes another kernel, which rounds differently
        x = x.expand(2, -1)
    activation, algorithm = ("gelu", "tanh") if gelu else ("none", "")
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], algorithm)
    return y[:rows]


def best_linear() -> Linear:
    """`fused_linear` where PyTorch was built with oneDNN."""
    return fused_linear if torch.backends.mkldnn.is_available() else plain_linear


class LinearGroup:
    """Layers that read the same input: one product where all of them are plain `nn.Linear`s and `linear` is fused.

    The layers then keep views of one weight, so they work as before and nothing is held twice. It is stored with the
    inputs as rows: for some tens of tokens oneDNN took 0.6 to 0.9 of the time it takes for PyTorch's own order. Make
    the group after adapters are in place; a layer replaced later is not seen.
    """

    def __init__(self, layers: Sequence[nn.Module], linear: Linear) -> None:
        self._linear = linear
        plain = [layer for layer in layers if type(layer) is nn.Linear]
        merge = linear is fused_linear and len(plain) == len(layers)
        self._layers = [_merge(plain)] if merge else list(layers)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in] -> [rows, sum of out], layer after layer."""
        outputs = [self._linear(layer, x) for layer in self._layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


@torch.inference_mode(False)
@torch.no_grad()
def _merge(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that computes them all; theirs become views of its parameters."""
    weight = torch.cat([layer.weight.t() for layer in layers], dim=1).t()
    bias = torch.cat([weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers])
    sizes = [len(layer.weight) for layer in layers]
    for layer, own_weight, own_bias in zip(layers, weight.split(sizes), bias.split(sizes), strict=True):
        layer.weight.data = own_weight
        if layer.bias is not None:
            layer.bias.data = own_bias
    merged = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    merged.weight, merged.bias = (nn.Parameter(p, requires_grad=False) for p in (weight, bias))
    return merged

"""Linear layers, computed by the fastest matrix product of the device, and groups of layers that share an input.

PyTorch multiplies float32 matrices with MKL, which uses slower AVX2 kernels on AMD processors: 98 GFLOP/s where oneDNN
reached 204 on one Zen 5 core; on Intel the two are equal. oneDNN also fuses the activation. With two rows or more, its
result for a row does not depend on the number of other rows, so a request's bits do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_executor.kernels.cpu_kernels import PANEL, Kernels, pack

Group = Callable[..., Tensor]
"""(x [rows, in], gelu=False) -> [rows, sum of out]: layers that read the same input, run together."""

MakeGroup = Callable[..., Group]
"""(*layers) -> the group of these layers."""

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


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False) -> Tensor:
    """x [rows, in] times weight [out, in], transposed, plus bias [out]. A row's bits depend on that row alone."""
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


USUAL_ROWS = 64
"""Number of rows that oneDNN optimizes the order of packed weights for; from 2 to 1,088 rows the order was the same."""

PACKED_BYTES = 1 << 30
"""Largest denoiser, in bytes of weights, whose weights are packed in oneDNN's order. Larger ones stay as they are,
mapped from the checkpoint's file where the dtype is the same."""


class LinearGroup:
    """Layers that read the same input, computed as one product. Create it after weights are loaded; later changes to
    them have no effect.

    On a CPU with `keep_packed`, if all are plain `nn.Linear`s, their weights are concatenated in the order that our
    compiled kernels, if given, or oneDNN read. This saves oneDNN from rearranging them in every call: products of some
    tens of tokens took 0.5 to 0.9 of the time, with the same bits. With `owns_layers` the layers' own weights are
    freed, and they can no longer run by themselves. On a GPU the weights of plain layers are always concatenated, and
    the layers' own become views. All other layers run one after the other.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        linear: Linear,
        keep_packed: bool,
        kernels: Kernels | None = None,
        *,
        owns_layers: bool = False,
    ) -> None:
        self._linear = linear
        self._layers = layers
        plain = [layer for layer in layers if is_plain(layer)]
        can_pack = keep_packed and linear is fused_linear and len(plain) == len(layers) and has_onednn(plain[0].weight)
        self._kernels = kernels if can_pack and _suits_kernels(plain) else None
        self._packed = _pack(plain, self._kernels) if can_pack else None
        if self._packed is not None and owns_layers:
            for layer in plain:
                layer.to("meta")
        if linear is gpu_linear and len(plain) == len(layers) > 1:
            self._layers = [_joined(plain)]

    def __call__(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """x: [rows, in] -> [rows, sum of out], outputs in the order of the layers."""
        if self._packed is not None and self._kernels is not None:
            return self._kernels.linear(x, *self._packed, gelu=gelu)
        if self._packed is not None:
            return onednn_product(x, *self._packed, gelu=gelu)
        outputs = [self._linear(layer, x, gelu=gelu) for layer in self._layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def add_to(self, y: Tensor, x: Tensor, *, gelu: bool = False) -> Tensor:
        """y [rows, sum of out], contiguous, plus the product with x; overwrites y. gelu: apply it to the sum."""
        if self._packed is not None and self._kernels is not None:
            return self._kernels.linear(x, *self._packed, gelu=gelu, onto=y)
        y = y.add_(self(x))
        return F.gelu(y, approximate="tanh") if gelu else y


class AdaptedGroup:
    """A group with an adapter: adds the input times `down`, times `up`, to the group's output. A row's bits depend on
    that row alone, as in the group."""

    def __init__(self, group: LinearGroup, down: LinearGroup, up: LinearGroup) -> None:
        self._group, self._down, self._up = group, down, up

    def __call__(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """As `LinearGroup.__call__`."""
        return self._up.add_to(self._group(x), self._down(x), gelu=gelu)


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


@torch.no_grad()
def _pack(layers: Sequence[nn.Linear], kernels: Kernels | None) -> tuple[Tensor, Tensor]:
    """(packed weight, bias) of all layers together; the packed weight can only be used by its kernels."""
    weights, biases = _weights(layers)
    weight, bias = torch.cat(weights), torch.cat(biases)
    if kernels is not None:
        return pack(weight), bias
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, USUAL_ROWS)
    return packed, bias


def _weights(layers: Sequence[nn.Linear]) -> tuple[list[Tensor], list[Tensor]]:
    """The layers' weights, and their biases, zeros for a layer without."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [
        w.new_zeros(len(w)) if (b := layer.bias) is None else b for layer, w in zip(layers, weights, strict=True)
    ]
    return weights, biases


@torch.no_grad()
def _joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that computes the outputs of all, side by side. The layers' own weights become views of its weight."""
    weights, biases = _weights(layers)
    joined = nn.Linear(weights[0].shape[1], sum(map(len, weights)), device="meta")
    joined.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    parts = joined.weight.split([len(weight) for weight in weights])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight = nn.Parameter(part, requires_grad=False)
    return joined


def _suits_kernels(layers: Sequence[nn.Linear]) -> bool:
    return layers[0].weight.dtype == torch.float32 and sum(layer.out_features for layer in layers) % PANEL == 0

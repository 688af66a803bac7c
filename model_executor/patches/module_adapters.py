"""LoRA adapters for modules that run as a whole, UNets and text encoders: wraps each changed layer in one that adds to
its output.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from model_executor.checkpoint.quantization import Int8Linear
from model_executor.kernels.cpu_layers import FastConv, FastLinear, use_onednn
from model_executor.patches.adapters import Adapter, LowRank


def adapt_module(module: Any, layers: Mapping[str, LowRank], adapter: Adapter) -> Any:
    """A copy of a diffusers or transformers module with these layers of the adapter; they share all weights. Raises
    ConfigError where the adapter does not fit."""
    twin = _twin_of(module)
    modules = dict(module.named_modules())
    for name, low in layers.items():
        name = name if hasattr(module, "text_model") else name.removeprefix("text_model.")  # transformers 5 drops it
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear | nn.Conv2d | FastLinear | FastConv | Int8Linear):
            raise adapter.refuse(f"it changes {name}, which is no linear layer or convolution of this model")
        adapter.check_size(name, low, *_sizes(layer))
        added = _layers(layer, low).to(module.device, module.dtype)
        if module.device.type == "cpu":
            use_onednn(added)
        twin.set_submodule(name, AdaptedLayer(layer, added))
    return twin


class AdaptedLayer(nn.Module):
    """A layer with an adapter's addition to its output."""

    def __init__(self, layer: nn.Module, added: nn.Module) -> None:
        super().__init__()
        self._layer, self._added = layer, added

    def forward(self, x: Tensor) -> Tensor:
        """As the layer's own."""
        y: Tensor = self._layer(x) + self._added(x)
        return y


def _twin_of(module: nn.Module) -> nn.Module:
    """A deep copy that shares all tensors."""
    memo = {
        id(value): value
        for part in module.modules()
        for value in (*part.parameters(recurse=False), *part.buffers(recurse=False), *vars(part).values())
        if isinstance(value, Tensor)
    }
    return deepcopy(module, memo)


def _sizes(layer: Any) -> tuple[int, int]:
    """(inputs, outputs) of a layer, per row or pixel."""
    if isinstance(layer, nn.Conv2d | FastConv):
        return layer.in_channels * prod(layer.kernel_size), layer.out_channels
    return layer.in_features, layer.out_features


def _layers(layer: Any, low: LowRank) -> nn.Module:
    """The addition to a layer, as two layers of the same kind."""
    if isinstance(layer, nn.Conv2d | FastConv):
        sizes: Any = {"kernel_size": layer.kernel_size, "stride": layer.stride, "padding": layer.padding}
        first: nn.Module = nn.Conv2d(layer.in_channels, len(low.down), **sizes, bias=False, device="meta")
        last: nn.Module = nn.Conv2d(len(low.down), layer.out_channels, 1, bias=False, device="meta")
    else:
        first = nn.Linear(layer.in_features, len(low.down), bias=False, device="meta")
        last = nn.Linear(len(low.down), layer.out_features, bias=False, device="meta")
    for half, weight in ((first, low.down), (last, low.up)):
        shape: torch.Size = half.weight.shape  # type: ignore[assignment]
        half.weight = nn.Parameter(weight.view(shape), requires_grad=False)
    return nn.Sequential(first, last)

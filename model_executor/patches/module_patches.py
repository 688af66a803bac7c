"""ModulePatches: adapters of a module that runs as a whole: a UNet, a text encoder, a denoiser's embedding of time.

For each combination of adapters there is a twin of the module, with changed layers wrapped in ones that add to their
outputs. Twins share all weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from core.patches import PatchSet
from model_executor.checkpoint.quantization import Int8Linear
from model_executor.host_weights import ON_DEVICE, HostWeights, Weights
from model_executor.kernels.cpu_layers import FastConv, FastLinear, use_onednn
from model_executor.kernels.low_rank import LowRank
from model_executor.patches.adapters import Adapter, Layers
from model_executor.patches.part_patches import PartPatches

KEPT_TWINS = 16
"""Combinations of adapters whose twins are kept, those used last. A twin takes no memory for weights, and some time to
make: its modules are copied."""

T = TypeVar("T")

PreparedModule = Mapping[str, nn.Module]
"""Layer's name -> the addition to it, of an adapter that fits its module."""


class ModulePatches(PartPatches[PreparedModule], Generic[T]):
    """A module with its adapters. plain: what `make` has made of the module without any."""

    def __init__(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, make: Callable[[nn.Module], T]
    ) -> None:
        """device, dtype: of computing."""
        self.plain = make(module)
        self._module, self._device, self._dtype, self._make = module, device, dtype, make
        self._adapters: dict[str, PreparedModule] = {}  # patch -> its additions
        self._twins: OrderedDict[tuple[str, ...], _Twin[T]] = OrderedDict()  # patches -> their twin; latest used last
        self.weights: Weights = ON_DEVICE

    def keep_on_host(self) -> None:
        """Have the module's weights, but not those of adapters, in host memory while nothing uses them. Raises as
        `HostWeights`."""
        self.weights = HostWeights((self._module,), self._device)

    def prepare(self, adapter: Adapter, layers: Layers) -> PreparedModule:
        module = self._module
        modules = dict(module.named_modules())
        prepared: dict[str, nn.Module] = {}
        for name, low in layers.items():
            if not hasattr(module, "text_model"):  # transformers 5 drops it
                name = name.removeprefix("text_model.")
            layer = modules.get(name)
            if not isinstance(layer, nn.Linear | nn.Conv2d | FastLinear | FastConv | Int8Linear):
                raise adapter.refuse(f"it changes {name}, which is no linear layer or convolution of this model")
            adapter.check_size(name, low, *_sizes(layer))
            prepared[name] = added = _layers(layer, adapter.converted(name, low, self._device, self._dtype))
            if self._device.type == "cpu":
                use_onednn(added)
        return prepared

    def put(self, patch: str, prepared: PreparedModule) -> None:
        self._adapters[patch] = prepared

    def drop(self, patch: str) -> None:
        self._adapters.pop(patch, None)
        for patches in list(self._twins):  # in one operation: another thread may compute with other patches
            if patch in patches:
                self._twins.pop(patches, None)

    def changed_by(self, patches: PatchSet) -> PatchSet:
        """Those of these patches that change this module."""
        return tuple(patch for patch in patches if patch.id in self._adapters)

    def under(self, patches: PatchSet) -> T:
        """What `make` has made of the module with these patches; to be used before the next call, which may change
        scales. Patches that do not change this module have no effect."""
        mine = self.changed_by(patches)
        if not mine:
            return self.plain
        ids = tuple(patch.id for patch in mine)
        twin = self._twins.pop(ids) if ids in self._twins else self._make_twin(ids)
        self._twins[ids] = twin
        if len(self._twins) > KEPT_TWINS:
            self._twins.popitem(last=False)
        twin.set_scales([patch.scale for patch in mine])
        return twin.made

    def _make_twin(self, ids: Sequence[str]) -> _Twin[T]:
        twin = _twin_of(self._module)
        scales = [torch.ones((), device=self._device) for _ in ids]
        changed = {name for patch in ids for name in self._adapters[patch]}
        for name in changed:
            additions = [(its[name], scale) for its, scale in self._of(ids, scales) if name in its]
            twin.set_submodule(name, PatchedLayer(self._module.get_submodule(name), additions))
        return _Twin(self._make(twin), scales)

    def _of(self, ids: Sequence[str], scales: Sequence[Tensor]) -> list[tuple[PreparedModule, Tensor]]:
        return [(self._adapters[patch], scale) for patch, scale in zip(ids, scales, strict=True)]


def unarranged(module: Any, device: torch.device | None = None) -> ModulePatches[Any]:
    """The adapters of a model's part, whose twins are used as they are. device: of computing; None: the module's."""
    return ModulePatches(module, device or module.device, module.dtype, lambda twin: twin)


@dataclass(slots=True)
class _Twin(Generic[T]):
    made: T
    scales: Sequence[Tensor]  # of each patch, float32 scalars that its layers read
    values: Sequence[float] = ()  # of these tensors

    def set_scales(self, values: Sequence[float]) -> None:
        if values != self.values:
            for tensor, value in zip(self.scales, values, strict=True):
                tensor.fill_(value)
            self.values = values


class PatchedLayer(nn.Module):
    """A layer with additions to its output, each with its scale, a float32 scalar."""

    def __init__(self, layer: nn.Module, additions: Sequence[tuple[nn.Module, Tensor]]) -> None:
        super().__init__()
        self._layer, self._added = layer, nn.ModuleList(added for added, _ in additions)
        self._scales = [scale for _, scale in additions]

    def forward(self, x: Tensor) -> Tensor:
        """As the layer's own."""
        y: Tensor = self._layer(x)
        for added, scale in zip(self._added, self._scales, strict=True):
            y = y + added(x) * scale
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

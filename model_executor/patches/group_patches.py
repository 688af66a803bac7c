"""GroupPatches: adapters of a denoiser whose linear layers run in groups: each changes the rows of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model_executor.kernels.linear_groups import AnyGroup
from model_executor.kernels.low_rank import LowRank
from model_executor.patches.adapters import Adapter, Layers
from model_executor.patches.module_patches import ModulePatches, PreparedModule
from model_executor.patches.part_patches import PartPatches

Groups = Mapping[tuple[nn.Module, ...], AnyGroup]
"""Layers -> the group that computes them."""


@dataclass(frozen=True, slots=True)
class PreparedGroups:
    """An adapter that fits a denoiser, ready to be put in use."""

    additions: Sequence[tuple[AnyGroup, Any]]  # to each group that it changes
    whole: PreparedModule  # to the part that runs as a whole


class GroupPatches(PartPatches[PreparedGroups]):
    """The adapters of one denoiser."""

    def __init__(
        self,
        module: nn.Module,
        groups: Groups,
        whole: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        fits_narrow: bool,
    ) -> None:
        """whole: name of the part that runs as a whole, row by row; "": there is none. device, dtype: of computing;
        packed layers may no longer hold weights to read them from. fits_narrow: see `Denoiser.fits_narrow_adapters`."""
        part = module.get_submodule(whole) if whole else nn.Module()
        self.whole: ModulePatches[Any] = ModulePatches(part, device, dtype, lambda part: part)
        self._groups, self._prefix, self._device, self._dtype = groups, f"{whole}.", device, dtype
        self._fits_narrow = fits_narrow
        self._names = {layer: name for name, layer in module.named_modules()}

    def prepare(self, adapter: Adapter, layers: Layers) -> PreparedGroups:
        of_whole = {name: low for name, low in layers.items() if name.startswith(self._prefix)}
        prepared = self.whole.prepare(adapter, {name.removeprefix(self._prefix): low for name, low in of_whole.items()})
        left = {name: low for name, low in layers.items() if name not in of_whole}
        additions = [
            (group, group.addition(lows))
            for members, group in self._groups.items()
            if any(lows := [self._take(left, layer, adapter) for layer in members])
        ]
        if left:
            raise adapter.refuse(f"it changes {min(left)}, which is no linear layer of this transformer")
        return PreparedGroups(additions, prepared)

    def put(self, patch: str, prepared: PreparedGroups) -> None:
        for group, addition in prepared.additions:
            group.put(patch, addition)
        self.whole.put(patch, prepared.whole)

    def drop(self, patch: str) -> None:
        for group in self._groups.values():
            group.drop(patch)
        self.whole.drop(patch)

    def _take(self, left: dict[str, LowRank], layer: nn.Module, adapter: Adapter) -> LowRank | None:
        """Take the addition to a layer out of those that are left."""
        name = self._names[layer]
        low = left.pop(name, None)
        if low is None:
            return None
        inputs, outputs = _sizes(layer)
        if self._fits_narrow and (missing := inputs - low.down.shape[1]) > 0:
            low = LowRank(nn.functional.pad(low.down, (0, missing)), low.up)
        adapter.check_size(name, low, inputs, outputs)
        return adapter.converted(name, low, self._device, self._dtype)


def _sizes(layer: Any) -> tuple[int, int]:
    """(inputs, outputs) of a layer, per row."""
    if isinstance(layer, nn.Conv2d):
        return layer.weight[0].numel(), layer.out_channels
    return layer.in_features, layer.out_features

"""Groups of linear layers that share an input, computed as one product, with low-rank additions for some rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from model_executor.kernels.cpu_kernels import Kernels, Order, can_gelu, can_multiply
from model_executor.kernels.linear import (
    Linear,
    fused_linear,
    gpu_linear,
    gpu_product,
    has_onednn,
    is_plain,
    onednn_product,
    plain_linear,
)
from model_executor.kernels.low_rank import AddedPanels, AddedProducts, LowRank, Segments, runs
from model_executor.kernels.ragged import Span

USUAL_ROWS = 64
"""Number of rows that oneDNN optimizes the order of packed weights for; from 2 to 1,088 rows the order was the same."""

PACKED_BYTES = 1 << 30
"""Largest denoiser, in bytes of weights, whose weights are packed wherever that is faster. Larger ones stay as they
are, mapped from the checkpoint's file where the dtype is the same, if a row keeps its bits so: see `keeps_packed`."""

Addition = TypeVar("Addition", AddedPanels, AddedProducts)


class Packed(NamedTuple):
    """The weights and biases of a group's layers, side by side. If the layers' own are freed, it is the attribute
    `packed` of the first layer: a module that comes from another process with it (`model_executor/weights`) is packed
    already.
    """

    order: Order  # of the weights
    weight: Tensor
    bias: Tensor


class LinearGroup(ABC, Generic[Addition]):
    """Layers that read the same input, computed as one product. Made after weights are loaded; later changes to them
    have no effect.

    A patch may add low-rank products to the outputs of some rows. All other rows keep their bits.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._inputs: int = layers[0].in_features
        self._outputs: list[int] = [layer.out_features for layer in layers]
        self._additions: dict[str, Addition] = {}  # patch -> what it adds

    @property
    def num_inputs(self) -> int:
        """Numbers that each layer reads of a row."""
        return self._inputs

    @property
    def num_outputs(self) -> int:
        """Of all layers together."""
        return sum(self._outputs)

    def __call__(self, x: Tensor, where: Segments = (), *, gelu: bool = False, out: Tensor | None = None) -> Tensor:
        """x: [rows, in] -> [rows, sum of out], outputs in the order of the layers; gelu applies the tanh approximation.
        where: the rows that patches change; patches that add nothing to these layers have no effect. out: of the
        result's shape, with contiguous rows, to write to; None: a new tensor."""
        if not where or not x.shape[0]:  # no row: a rank whose share of the tokens is empty
            return self._product(x, gelu=gelu, out=out)
        segments = tuple(each for each in where if each.patch in self._additions)
        return self._patched(x, segments, gelu=gelu, out=out) if segments else self._product(x, gelu=gelu, out=out)

    def takes_columns(self, where: Segments) -> bool:
        """Whether `of_columns` can be used. where: the rows that patches change."""
        return False

    def of_columns(self, parts: Sequence[Tensor]) -> Tensor:
        """The layer for an input whose columns are those of the parts, [rows, some of in] each, side by side: one
        product for each part, which saves a copy. What they sum up is rounded in between."""
        raise NotImplementedError

    @abstractmethod
    def addition(self, lows: Sequence[LowRank | None]) -> Addition:
        """What a patch adds to these layers, as `put` takes it. lows: for each layer, in the group's dtype on its
        device; None for nothing. Changes nothing: any thread may call it."""

    def put(self, patch: str, addition: Addition) -> None:
        """Have this addition change the rows of a patch."""
        self._additions[patch] = addition

    def drop(self, patch: str) -> None:
        """Drop a patch's addition, if it has one."""
        self._additions.pop(patch, None)

    @abstractmethod
    def _product(self, x: Tensor, *, gelu: bool = False, out: Tensor | None = None) -> Tensor:
        """The layers alone."""

    @abstractmethod
    def _patched(self, x: Tensor, segments: Segments, *, gelu: bool, out: Tensor | None) -> Tensor:
        """The layers with the additions of these segments, of which there are some."""


AnyGroup = LinearGroup[Any]

MakeGroup = Callable[..., AnyGroup]
"""(*layers) -> the group of these layers."""


def group_layers(
    layers: Sequence[nn.Module],
    linear: Linear,
    keep_packed: bool,
    kernels: Kernels | None = None,
    *,
    owns_layers: bool = False,
) -> AnyGroup:
    """The group of these layers. keep_packed: on a CPU, keep the weights in the order that products read. kernels: the
    compiled ones, to be used where they apply. owns_layers: the layers' own weights are freed if copies are kept, and
    they can no longer run by themselves. Raises RuntimeError for layers that were packed for other kernels."""
    plain: list[Any] = [layer for layer in layers if is_plain(layer)]
    if not keep_packed or linear is not fused_linear or len(plain) < len(layers) or not _can_pack(plain[0]):
        return ProductGroup(layers, linear, kernels)
    group = PackedGroup(plain, kernels) if kernels is None or not _suits_kernels(plain) else KernelGroup(plain, kernels)
    if owns_layers:
        plain[0].packed = group.packed
        for layer in plain:
            layer.to("meta")
    return group


def keeps_packed(nbytes: int, dtype: torch.dtype, kernels: Kernels | None) -> bool:
    """Whether a denoiser with so many bytes of weights keeps them packed. In bfloat16 with AMX each does: only products
    of packed weights keep a row's bits there."""
    return nbytes <= PACKED_BYTES or _has_tiles(dtype, kernels)


class ProductGroup(LinearGroup[AddedProducts]):
    """Layers of any kind, on any device, which run one after the other. On a GPU the weights of plain layers are
    concatenated, and the layers' own become views."""

    def __init__(self, layers: Sequence[nn.Module], linear: Linear, kernels: Kernels | None = None) -> None:
        """kernels: to activate rows that have been added to."""
        super().__init__(layers)
        plain = [layer for layer in layers if is_plain(layer)]
        self._linear, self._layers, self._kernels = linear, layers, kernels
        if linear not in (plain_linear, fused_linear) and len(plain) == len(layers) > 1:
            self._layers = [_joined(plain)]

    def addition(self, lows: Sequence[LowRank | None]) -> AddedProducts:
        return AddedProducts(lows, self._outputs, self._linear_of)

    def takes_columns(self, where: Segments) -> bool:
        """On a GPU, a single plain layer, where no patch adds to it."""
        is_single = len(self._layers) == 1 and is_plain(self._layers[0])
        return self._linear is gpu_linear and is_single and not any(each.patch in self._additions for each in where)

    def of_columns(self, parts: Sequence[Tensor]) -> Tensor:
        (layer,) = self._layers
        assert is_plain(layer)
        weights = layer.weight.split([part.shape[1] for part in parts], dim=1)
        y = gpu_product(parts[0], weights[0], layer.bias)
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            y.addmm_(part, weight.t())
        return y

    def _linear_of(self, layer: nn.Linear) -> AnyGroup:
        kernels = self._kernels
        if kernels is not None and _has_tiles(layer.weight.dtype, kernels):
            return KernelGroup([layer], kernels)
        return ProductGroup([layer], self._linear)

    def _product(self, x: Tensor, *, gelu: bool = False, out: Tensor | None = None) -> Tensor:
        outputs = [self._linear(layer, x, gelu=gelu) for layer in self._layers]
        return _joined_in(out, outputs, dim=1)

    def _patched(self, x: Tensor, segments: Segments, *, gelu: bool, out: Tensor | None) -> Tensor:
        if not (gelu and len(x)):  # of a group's members, some may have no rows
            y = self._product(x, gelu=gelu, out=out)
            for each in segments:
                rows = slice(*each.rows)
                self._additions[each.patch].add_(y[rows], x[rows], each.scale)
            return y
        # Rows without additions must keep the bits of a product that applies the activation before it rounds.
        parts = [self._activated(x, rows, its) for rows, its in runs(len(x), segments)]
        return _joined_in(out, parts, dim=0)

    def _activated(self, x: Tensor, rows: Span, segments: Segments) -> Tensor:
        """These rows of the output with GELU, all of which have all of these segments."""
        x = x[slice(*rows)]
        y = self._product(x, gelu=not segments)
        for each in segments:
            self._additions[each.patch].add_(y, x, each.scale_of(rows))
        return self._gelu_(y) if segments else y

    def _gelu_(self, y: Tensor) -> Tensor:
        if self._kernels is not None and can_gelu(y):
            return self._kernels.gelu_(y)
        activated: Tensor = torch.ops.aten.gelu_(y, approximate="tanh")
        return activated


class PackedGroup(ProductGroup):
    """Plain layers on a CPU, whose weights are concatenated in oneDNN's order. This saves it from rearranging them in
    every call: products of some tens of tokens took 0.5 to 0.9 of the time, with the same bits."""

    def __init__(self, layers: Sequence[nn.Linear], kernels: Kernels | None = None) -> None:
        super().__init__(layers, fused_linear, kernels)
        self.packed = _packed(
            layers, "oneDNN", lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, USUAL_ROWS)
        )

    def _linear_of(self, layer: nn.Linear) -> AnyGroup:
        return PackedGroup([layer])

    def _product(self, x: Tensor, *, gelu: bool = False, out: Tensor | None = None) -> Tensor:
        return _joined_in(out, [onednn_product(x, self.packed.weight, self.packed.bias, gelu=gelu)], dim=0)


class KernelGroup(LinearGroup[AddedPanels]):
    """Plain layers on a CPU, whose concatenated weights our compiled kernels read."""

    def __init__(self, layers: Sequence[nn.Linear], kernels: Kernels) -> None:
        super().__init__(layers)
        self.kernels = kernels
        self.packed = _packed(layers, kernels.order(layers[0].weight.dtype), kernels.pack)

    def addition(self, lows: Sequence[LowRank | None]) -> AddedPanels:
        return AddedPanels(lows, self._outputs)

    def _product(self, x: Tensor, *, gelu: bool = False, out: Tensor | None = None) -> Tensor:
        return self.kernels.linear(x, self.packed.weight, self.packed.bias, gelu=gelu, out=out)

    def _patched(self, x: Tensor, segments: Segments, *, gelu: bool, out: Tensor | None) -> Tensor:
        lows = {
            each: self._additions[each.patch].low(self.kernels, x[slice(*each.rows)], each.scale) for each in segments
        }
        pieces = [
            (*rows, [self._additions[each.patch].of(lows[each][rows[0] - each.rows[0] :]) for each in its])
            for rows, its in runs(len(x), segments)
        ]
        return self.kernels.linear(x, self.packed.weight, self.packed.bias, gelu=gelu, pieces=pieces, out=out)


def _joined_in(out: Tensor | None, parts: Sequence[Tensor], dim: int) -> Tensor:
    """The parts side by side (dim 1) or one below the other (dim 0), in `out` if that is given."""
    if len(parts) > 1:
        return torch.cat(list(parts), dim=dim, out=out)
    return parts[0] if out is None else out.copy_(parts[0])


def _has_tiles(dtype: torch.dtype, kernels: Kernels | None) -> bool:
    """Whether our kernels multiply this dtype with tiles. So does oneDNN then, and does not keep a row's bits."""
    return kernels is not None and kernels.order(dtype) == "tiles"


def _can_pack(layer: nn.Linear) -> bool:
    return hasattr(layer, "packed") or has_onednn(layer.weight)


def _packed(layers: Sequence[nn.Linear], order: Order, pack: Callable[[Tensor], Tensor]) -> Packed:
    """The weights of these layers in an order, which `pack` brings about if they are not packed already."""
    packed: Packed | None = getattr(layers[0], "packed", None)
    if packed is None:
        weight, bias = _concatenated(layers)
        return Packed(order, pack(weight), bias)
    if packed.order != order:
        raise RuntimeError(
            f"weights were packed in the order of {packed.order}, and that of {order} is read here: of two processes "
            "one has no compiled kernels, as the log says; start the server again"
        )
    return packed


@torch.no_grad()
def _concatenated(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """(weight, bias) of all layers together; zeros for a layer without bias."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [
        w.new_zeros(len(w)) if (b := layer.bias) is None else b for layer, w in zip(layers, weights, strict=True)
    ]
    return torch.cat(weights), torch.cat(biases)


@torch.no_grad()
def _joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that computes the outputs of all, side by side. The layers' own weights become views of its weight."""
    weight, bias = _concatenated(layers)
    joined = nn.Linear(weight.shape[1], len(weight), device="meta")
    joined.weight, joined.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
    parts = joined.weight.split([layer.out_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight = nn.Parameter(part, requires_grad=False)
    return joined


def _suits_kernels(layers: Sequence[nn.Linear]) -> bool:
    weight = layers[0].weight
    return can_multiply(weight.dtype, weight.shape[1], sum(layer.out_features for layer in layers))

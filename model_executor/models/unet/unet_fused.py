"""The blocks of a UNet on a GPU: as in `unet_blocks.py`, with the kernels of `UnetOperators` between products,
convolutions and attention, which take fewer launches, and fewer passes over memory.

Maps stay in the memory format channels_last throughout. A convolution's bias, the embedding of time and residuals are
added by the kernel that reads the result next. Layers may be wrapped ones with adapters, or quantised ones: those run
as they are, and what is known to be plain is joined: the products of self-attention, and of all blocks' embeddings of
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from torch import Tensor, nn

from model_executor.kernels.linear import is_plain
from model_executor.kernels.operators import Operators
from model_executor.kernels.unet_operators import (
    AddedToMap,
    Fresh,
    OpenPages,
    Outside,
    UnetOperators,
    channels_first,
    pixels_last,
)
from model_executor.models.base import Row
from model_executor.models.boxes import Box, share, times
from model_executor.models.unet.unet_blocks import (
    ResidualBlock,
    TransformerBlock,
    UpSampler,
    Walk,
    attended_by,
    embedded,
)
from model_executor.models.unet.unet_sources import UnetEdit

MARGIN = 2
"""Pixels around its window that a residual block's two convolutions read."""


class FusedEdit(UnetEdit):
    """The source of a masked request whose pages kernels read. To blocks that are not of this module it is a plain
    `UnetEdit`."""

    def __init__(self, row: Row, operators: Operators, of_unets: UnetOperators) -> None:
        super().__init__(row, operators)
        self._of_unets, self.columns, self.tokens = of_unets, row.grid[1], self._active
        self._opened = OpenPages(self._of_template)

    @cached_property
    def _places(self) -> Tensor:
        return self._of_unets.places(self._active, self._opened.num_tokens)

    def box(self, side: int) -> Box:
        """The box that convolutions compute, in a map with side * side pixels per token."""
        return times(self._box, side)

    @property
    def share(self) -> float:
        """Of the picture that the box covers."""
        return share(self._box, self._grid)

    def outside(self, block: ResidualBlock) -> Outside:
        """Where the moments of a block's second norm are, outside the box."""
        return Outside(self._opened, block.page, self._box, self._grid)

    def fill(
        self, block: TransformerBlock | FusedResidualBlock | FusedUpSampler, num_pixels: int, fresh: Fresh
    ) -> Tensor:
        """A block's whole output, [n, pixels, channels]: its pages, and what was computed of the active tokens or, for
        a convolutional block, of the box."""
        shape = len(fresh.change), num_pixels, block.channels
        where = self._places if isinstance(block, TransformerBlock) else self.box(block.side)
        return self._of_unets.fill(self._opened, block.page, shape, fresh, block.side, self.columns, where)


# ------------------------------------------------------------------------------------------------------------- products


class Joined(NamedTuple):
    """Plain linear layers of one input, side by side."""

    weight: Tensor  # [all outputs, in]
    bias: Tensor | None  # [all outputs]
    starts: Sequence[int]  # of each layer's outputs, and the end of the last one's

    def __call__(self, x: Tensor, first: int = 0) -> Tensor:
        """The outputs of the layers from this one on."""
        start = self.starts[first]
        return F.linear(x, self.weight[start:], None if self.bias is None else self.bias[start:])


@torch.no_grad()
def joined(layers: Sequence[Any]) -> Joined | None:
    """These layers as one; None unless all are plain. Their weights become views of one tensor, unless they are that
    already: twins with adapters share them."""
    plain = [layer for layer in layers if is_plain(layer)]
    if len(plain) < len(layers) or not plain:
        return None
    weights = list[Tensor](layer.weight for layer in plain)
    starts = [0, *accumulate(map(len, weights))]
    weight = _adjacent(weights)
    if weight is None:
        weight = torch.cat(weights)
        for layer, (start, stop) in zip(plain, pairwise(starts), strict=True):
            layer.weight = nn.Parameter(weight[start:stop], requires_grad=False)
    has_bias = any(layer.bias is not None for layer in plain)
    biases: list[Tensor] = [
        w.new_zeros(len(w)) if layer.bias is None else layer.bias for layer, w in zip(plain, weights, strict=True)
    ]
    return Joined(weight, torch.cat(biases) if has_bias else None, starts)


def _adjacent(weights: Sequence[Tensor]) -> Tensor | None:
    """One tensor over these weights if they lie one after the other in the same memory, else None."""
    first, rows, columns = weights[0], sum(map(len, weights)), weights[0].shape[1]
    starts = accumulate((weight.numel() for weight in weights), initial=first.storage_offset())
    storage = first.untyped_storage()
    are_adjacent = all(
        weight.untyped_storage()._cdata == storage._cdata
        and weight.storage_offset() == start
        and weight.is_contiguous()
        for weight, start in zip(weights, starts, strict=False)
    )
    return first.as_strided((rows, columns), (columns, 1)) if are_adjacent else None


class Convolution:
    """A convolution without its bias, where it is a plain one, for a kernel adds that to the result. bias: None if
    there is none, or the result has it."""

    def __init__(self, layer: Any) -> None:
        self._layer, self.bias = layer, None
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
            self._layer, self.bias = copy(layer), layer.bias
            self._layer._parameters = {"weight": layer.weight, "bias": None}

    def __call__(self, x: Tensor) -> Tensor:
        """Input and result: [n, rows, columns, channels]."""
        return pixels_last(self._layer(channels_first(x)))


def pointwise(layer: Any, x: Tensor, *, is_linear: bool) -> Tensor:
    """A linear layer, or a convolution of single pixels, of x, [n, rows, columns, channels]."""
    if is_linear:
        result: Tensor = layer(x)
        return result
    return (
        F.linear(x, layer.weight.flatten(1), layer.bias)
        if type(layer) is nn.Conv2d
        else pixels_last(layer(channels_first(x)))
    )


# --------------------------------------------------------------------------------------------------------------- blocks


class FusedTransformerBlock(TransformerBlock):
    """A diffusers BasicTransformerBlock. text_start: where its keys and values begin in `Walk.keys_values`."""

    def __init__(self, module: Any, side: int, operators: UnetOperators) -> None:
        super().__init__(module, side)
        own = module.attn1
        self._operators, self._own = operators, joined([own.to_q, own.to_k, own.to_v])
        self.text_start = 0

    def __call__(self, walk: Walk) -> None:
        assert walk.tokens is not None
        source = walk.source
        if self.side and isinstance(source, FusedEdit) and source.leaves_out(self):
            fresh, num_pixels = self._of_active(walk, walk.tokens, source), walk.tokens.shape[1]
            walk.tokens = source.fill(self, num_pixels, fresh)
        else:
            walk.tokens = self._of_all(walk, walk.tokens)
            if self.side:
                source.store(self, walk.tokens)

    def keys_values(self, text: Tensor) -> Tensor:
        """Keys and values of the second attention, side by side. text: [..., text tokens, width]."""
        return torch.cat([self._module.attn2.to_k(text), self._module.attn2.to_v(text)], dim=-1)

    def _of_active(self, walk: Walk, tokens: Tensor, edit: FusedEdit) -> Fresh:
        own, operators = self._module.attn1, self._operators
        normed, some, some_normed = operators.norm_and_gather(
            self._module.norm1, tokens, edit.tokens, self.side, edit.columns
        )
        if self._own is None:
            queries, keys, values = own.to_q(some_normed), own.to_k(normed), own.to_v(normed)
        else:
            queries, (keys, values) = own.to_q(some_normed), self._own(normed, 1).chunk(2, dim=2)
        return Fresh(self._after(walk, some, attended_by(own, queries, keys, values)), some)

    def _of_all(self, walk: Walk, tokens: Tensor) -> Tensor:
        own, normed, tokens = self._module.attn1, self._module.norm1(tokens), tokens.contiguous()
        if self._own is None:
            products: Sequence[Tensor] = (own.to_q(normed), own.to_k(normed), own.to_v(normed))
        else:
            products = self._own(normed).chunk(3, dim=2)
        return self._after(walk, tokens, attended_by(own, *products)).add_(tokens)

    def _after(self, walk: Walk, hidden: Tensor, attended: Tensor) -> Tensor:
        """The feed-forward's output, to be added to `hidden`, after the first attention's output and the second
        attention were added to it."""
        module, operators = self._module, self._operators
        normed = operators.add_and_norm_(module.norm2, hidden, attended)
        attended = attended_by(module.attn2, module.attn2.to_q(normed), *self._of_text(walk))
        normed = operators.add_and_norm_(module.norm3, hidden, attended)
        activation, _, last = module.ff.net
        change: Tensor = last(operators.geglu(activation.proj(normed)))
        return change

    def _of_text(self, walk: Walk) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompts."""
        if walk.keys_values is None:
            return self._module.attn2.to_k(walk.text), self._module.attn2.to_v(walk.text)
        keys, values = walk.keys_values[..., self.text_start :].split(self.channels, dim=2)[:2]
        return keys, values


class FusedResidualBlock(ResidualBlock):
    """A diffusers ResnetBlock2D. shift_start: where its embedding of time begins in `Walk.shifts`."""

    def __init__(self, module: Any, side: int, operators: UnetOperators) -> None:
        super().__init__(module, side)
        self._operators, self.shift_start = operators, 0
        self._padded = Convolution(module.conv1), Convolution(module.conv2)
        self._unpadded = Convolution(self._convolutions[0]), Convolution(self._convolutions[1])
        self._shortcut = None if module.conv_shortcut is None else Convolution(module.conv_shortcut)
        biases = [
            layer.bias.float()
            for layer in (self._padded[1], self._shortcut)
            if layer is not None and layer.bias is not None
        ]
        self._last_bias = sum(biases[1:], biases[0]) if biases else None  # what is added to a pixel of the output
        self._scale = 1.0 / float(module.output_scale_factor)

    @property
    def projection(self) -> nn.Module:
        """The layer that projects the embedding of time."""
        layer: nn.Module = self._module.time_emb_proj
        return layer

    def __call__(self, walk: Walk) -> None:
        source = walk.source
        if self.side and isinstance(source, FusedEdit) and source.has_box(self):
            x = pixels_last(walk.map)
            filled = source.fill(self, x.shape[1] * x.shape[2], self._of_box(walk, x, source))
            walk.map = channels_first(filled.unflatten(1, x.shape[1:3]))
        else:
            super().__call__(walk)

    def _whole(self, walk: Walk) -> Tensor:
        norms, operators, x = (self._module.norm1, self._module.norm2), self._operators, pixels_last(walk.map)
        normed = operators.normalised(norms[0], x, operators.moments(x, norms[0].num_groups), silu=True)
        hidden, added = self._padded[0](normed), AddedToMap(self._padded[0].bias, self._shift(walk))
        moments = operators.moments(hidden, norms[1].num_groups, added=added)
        change = self._padded[1](operators.normalised(norms[1], hidden, moments, added, silu=True))
        own = x if self._shortcut is None else self._shortcut(x)
        return channels_first(operators.add(own, change, self._last_bias, self._scale))

    def _of_box(self, walk: Walk, x: Tensor, edit: FusedEdit) -> Fresh:
        norms, operators = (self._module.norm1, self._module.norm2), self._operators
        left, top, *_ = box = edit.box(self.side)
        normed, raw = operators.normalised_and_cut(norms[0], x, operators.moments(x, norms[0].num_groups), box, MARGIN)
        hidden, added = self._unpadded[0](normed), AddedToMap(self._padded[0].bias, self._shift(walk))
        rows, columns = hidden.shape[1:3]  # of the box and one pixel around it
        moments = operators.moments(
            hidden, norms[1].num_groups, (1, 1, columns - 1, rows - 1), added, edit.outside(self), edit.share
        )
        of_map = 1 - left, 1 - top, x.shape[2] - left + 1, x.shape[1] - top + 1
        normed = operators.normalised(norms[1], hidden, moments, added, silu=True, valid=of_map)
        change = self._unpadded[1](normed).flatten(1, 2)
        if self._shortcut is None:
            return Fresh(change, x.flatten(1, 2), is_own_whole=True, bias=self._last_bias, scale=self._scale)
        return Fresh(change, self._shortcut(raw).flatten(1, 2), bias=self._last_bias, scale=self._scale)

    def _shift(self, walk: Walk) -> Tensor:
        """The embedding of time that is added to each pixel, [n, channels]."""
        if walk.shifts is None:
            return embedded(self._module, walk.time).flatten(1)
        return walk.shifts[:, self.shift_start : self.shift_start + self.channels]


class FusedUpSampler(UpSampler):
    """A diffusers Upsample2D."""

    def __init__(self, module: Any, side: int, operators: UnetOperators) -> None:
        super().__init__(module, side)
        self._operators, self._unpadded = operators, Convolution(self._convolution)

    def __call__(self, walk: Walk) -> None:
        source = walk.source
        if self.side and isinstance(source, FusedEdit) and source.has_box(self):
            left, top, right, bottom = source.box(self.side)
            rows, columns = walk.skips[-1].shape[2:]
            around_box = left - 1, top - 1, right + 1, bottom + 1
            large = self._operators.twice_as_large(pixels_last(walk.map), (rows, columns), around_box)
            fresh = Fresh(self._unpadded(large).flatten(1, 2), bias=self._unpadded.bias)
            walk.map = channels_first(source.fill(self, rows * columns, fresh).unflatten(1, (rows, columns)))
        else:
            super().__call__(walk)


def fits_transformer(block: Any) -> bool:
    """Whether a BasicTransformerBlock is of the kind that UNets usually have."""
    norms, attentions = (block.norm1, block.norm2, block.norm3), (block.attn1, block.attn2)
    return (
        block.norm_type == "layer_norm"
        and block.pos_embed is None
        and not block.only_cross_attention
        and all(type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None for norm in norms)
        and all(attention is not None and not attention.residual_connection for attention in attentions)
        and all(attention.rescale_output_factor == 1.0 for attention in attentions)
        and all(attention.norm_q is None and attention.norm_k is None for attention in attentions)
        and type(block.ff.net[0]) is GEGLU
    )


def fits_residual(resnet: Any) -> bool:
    """Whether a ResnetBlock2D is of the kind that UNets usually have."""
    return (
        resnet.time_embedding_norm == "default"
        and not resnet.skip_time_act
        and resnet.time_emb_proj is not None
        and resnet.upsample is None
        and resnet.downsample is None
        and isinstance(resnet.nonlinearity, nn.SiLU)
        and all(is_affine(norm) for norm in (resnet.norm1, resnet.norm2))
    )


def is_affine(norm: Any) -> bool:
    """Whether it is a group norm with weights."""
    return type(norm) is nn.GroupNorm and norm.weight is not None


# -------------------------------------------------------------------------------------------------------- other layers


def enter(operators: UnetOperators, transformer: Any, walk: Walk) -> None:
    """As Transformer2DModel before its first block."""
    x, norm = pixels_last(walk.map), transformer.norm
    normed = operators.normalised(norm, x, operators.moments(x, norm.num_groups), silu=False)
    walk.map = channels_first(x)
    walk.tokens = pointwise(transformer.proj_in, normed, is_linear=transformer.use_linear_projection).flatten(1, 2)


def leave(transformer: Any, walk: Walk) -> None:
    """As Transformer2DModel after its last block."""
    assert walk.tokens is not None
    tokens, x = walk.tokens.unflatten(1, walk.map.shape[2:]), pixels_last(walk.map)
    projected = pointwise(transformer.proj_out, tokens, is_linear=transformer.use_linear_projection)
    walk.map, walk.tokens = channels_first(projected + x), None


def finish(operators: UnetOperators, unet: Any, map_: Tensor) -> Tensor:
    """As UNet2DConditionModel after its last block."""
    norm, x = unet.conv_norm_out, pixels_last(map_)
    normed = operators.normalised(norm, x, operators.moments(x, norm.num_groups), silu=True)
    prediction: Tensor = unet.conv_out(channels_first(normed))
    return prediction

"""The layers of a diffusers UNet as a flat list in the order they run, and the pages that hold their outputs.

For mask-aware edits the output of every transformer block, residual block and up-sampler is cached, for all tokens (see
`unet_blocks.py`). All pages have one size: an output, written flat token by token, fills one page where the map is
small, and several where it is larger. Down-samplers and the deepest maps are computed whole, at negligible cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, groupby
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from core.model_info import BlockRun
from core.page_scheme import PageDtype, PageLayout
from model_executor.kernels.unet_operators import UnetOperators
from model_executor.models.unet import unet_fused
from model_executor.models.unet.unet_blocks import (
    TOKEN_SIDE,
    Compiled,
    Layer,
    ResidualBlock,
    TransformerBlock,
    UnetBlock,
    UpSampler,
    Walk,
)
from model_executor.models.unet.unet_fused import (
    FusedResidualBlock,
    FusedTransformerBlock,
    FusedUpSampler,
    fits_residual,
    fits_transformer,
    is_affine,
    joined,
)

MAX_GROUP = 64
"""Upper limit on values that share a scale in int8 pages; the number used divides every map's channels."""


FUSED = FusedResidualBlock, FusedTransformerBlock, FusedUpSampler
"""Blocks whose kernels find pages by a table."""


class Layers:
    """All layers between conv_in and conv_norm_out, in the order they run, with pages assigned to each `UnetBlock`."""

    def __init__(self, unet: Any, compiled: Compiled | None = None, fused: UnetOperators | None = None) -> None:
        """compiled: compiles the blocks' functions; None leaves them as they are. fused: the operators of blocks that
        are fused, where they are of the usual kind; None: none are."""
        make, deepest = _Maker(fused), len(unet.down_blocks) - 1
        self._layers = [*_down(unet, make), *_middle(unet.mid_block, deepest, make), *_up(unet, deepest, make)]
        self._kept = [layer for layer in self._layers if isinstance(layer, UnetBlock) and layer.side]
        self._unit = min(block.width for block in self._kept)
        self.num_pages = 0
        for block in self._kept:
            block.page, block.num_pages = self.num_pages, block.width // self._unit
            self.num_pages += block.num_pages
        # Whether all pages are found by their table: other blocks read the entry itself, which a CUDA graph has not.
        self.reads_page_tables = all(isinstance(block, FUSED) for block in self._kept)
        if compiled is not None:
            once = cache(compiled)
            for block in self._kept:
                block.compute = once(block.compute)
        blocks = ((n, layer) for n, layer in enumerate(self._layers) if isinstance(layer, UnetBlock) and layer.side)
        self._ends = [(block.page + block.num_pages, n + 1) for n, block in blocks]  # pages and layers up to each
        self._transformers = [layer for layer in self._layers if isinstance(layer, FusedTransformerBlock)]
        starts = accumulate((2 * block.channels for block in self._transformers), initial=0)
        for transformer, start in zip(self._transformers, starts, strict=False):
            transformer.text_start = start
        residuals = [layer for layer in self._layers if isinstance(layer, FusedResidualBlock)]
        self._projections = joined([block.projection for block in residuals])
        if self._projections is not None:
            for block, start in zip(residuals, self._projections.starts, strict=False):
                block.shift_start = start

    def project(self, time: Tensor) -> Tensor | None:
        """What the fused residual blocks add of the embedding of time, [n, channels of all], in one product; None if
        their layers are not plain, or there are none. time: [n, width]."""
        return None if self._projections is None else self._projections(F.silu(time))

    def keys_values(self, text: Tensor) -> Tensor | None:
        """Keys and values of prompts in all fused transformer blocks, side by side, [..., text tokens, width]; None if
        there are none. text: [..., text tokens, width]."""
        return (
            torch.cat([block.keys_values(text) for block in self._transformers], dim=-1) if self._transformers else None
        )

    @property
    def uneven_width(self) -> tuple[int, int] | None:
        """(numbers per token in a block's output that does not fill whole pages, numbers per token in a page); a page
        holds the smallest output. None if every output is a multiple of the smallest."""
        uneven = (block.width for block in self._kept if block.width % self._unit)
        return next(((width, self._unit) for width in uneven), None)

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        group = gcd(MAX_GROUP, self._unit // 2, *(block.channels for block in self._kept))
        return PageLayout(
            num_blocks=self.num_pages,
            num_heads=self._unit // 2 // group,
            head_dim=group,
            dtype=dtype,
            num_moments=max(block.num_moments for block in self._kept),
        )

    def block_runs(self, num_tokens: int) -> tuple[BlockRun, ...]:
        """The shares of compute of the blocks with pages, for a picture of `num_tokens`."""
        total = sum(block.work(num_tokens) for block in self._kept)
        kinds = groupby((block.num_pages, block.work(num_tokens) / total) for block in self._kept)
        return tuple(BlockRun(len(list(equal)), *kind) for kind, equal in kinds)

    def run(self, walk: Walk, start: int = 0, stop: int | None = None) -> None:
        """Run the blocks whose last page is in [start, stop) and the layers before each of them; None: to the end."""
        first = self._behind(start)
        for layer in self._layers[first : None if stop is None else self._behind(stop)]:
            layer(walk)

    def _behind(self, page: int) -> int:
        """Number of layers up to and including the last block whose pages are all before `page`."""
        return max((behind for end, behind in self._ends if end <= page), default=0)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes layers, fused ones where `fused` is given and they are of the usual kind."""

    fused: UnetOperators | None

    def residual(self, resnet: Any, level: int) -> Layer:
        """A residual block; computed whole (side 0) unless time is simply added to it."""
        if self.fused is not None and fits_residual(resnet):
            return FusedResidualBlock(resnet, TOKEN_SIDE >> level, self.fused)
        is_plain = resnet.time_embedding_norm == "default" and not resnet.skip_time_act
        return ResidualBlock(resnet, TOKEN_SIDE >> level if is_plain else 0)

    def transformer(self, transformer: Transformer2DModel, level: int) -> Iterator[Layer]:
        enters, leaves = partial(_enter, transformer), partial(_leave, transformer)
        if self.fused is not None and is_affine(transformer.norm):
            enters, leaves = partial(unet_fused.enter, self.fused, transformer), partial(unet_fused.leave, transformer)
        yield enters
        yield from (self._block(block, TOKEN_SIDE >> level) for block in transformer.transformer_blocks)
        yield leaves

    def _block(self, block: Any, side: int) -> Layer:
        if self.fused is not None and fits_transformer(block):
            return FusedTransformerBlock(block, side, self.fused)
        return TransformerBlock(block, side)

    def up_sampler(self, sampler: Any, side: int) -> Layer:
        return UpSampler(sampler, side) if self.fused is None else FusedUpSampler(sampler, side, self.fused)


def _down(unet: Any, make: _Maker) -> Iterator[Layer]:
    yield _keep
    for level, block in enumerate(unet.down_blocks):
        for number, resnet in enumerate(block.resnets):
            yield make.residual(resnet, level)
            if hasattr(block, "attentions"):
                yield from make.transformer(block.attentions[number], level)
            yield _keep
        for sampler in block.downsamplers or ():
            yield partial(_sample, sampler)
            yield _keep


def _middle(block: Any, level: int, make: _Maker) -> Iterator[Layer]:
    first, *others = block.resnets
    yield make.residual(first, level)
    for transformer, resnet in zip(block.attentions, others, strict=True):
        yield from make.transformer(transformer, level)
        yield make.residual(resnet, level)
    yield _steer


def _up(unet: Any, deepest: int, make: _Maker) -> Iterator[Layer]:
    for number, block in enumerate(unet.up_blocks):
        level = deepest - number
        for i, resnet in enumerate(block.resnets):
            yield _join
            yield make.residual(resnet, level)
            if hasattr(block, "attentions"):
                yield from make.transformer(block.attentions[i], level)
        for sampler in block.upsamplers or ():
            yield make.up_sampler(sampler, TOKEN_SIDE >> (level - 1))


def _keep(walk: Walk) -> None:
    walk.skips.append(walk.map)


def _steer(walk: Walk) -> None:
    """Add what other models add to the middle's map."""
    if walk.steering is not None:
        walk.map = walk.steering.add_to(walk.map, len(walk.skips))


def _join(walk: Walk) -> None:
    kept = walk.skips.pop()
    if walk.steering is not None:
        kept = walk.steering.add_to(kept, len(walk.skips))
    walk.map = torch.cat([walk.map, kept], dim=1)


def _sample(sampler: Any, walk: Walk) -> None:
    walk.map = sampler(walk.map)


def _enter(transformer: Any, walk: Walk) -> None:
    walk.tokens, _ = transformer._operate_on_continuous_inputs(walk.map)


def _leave(transformer: Any, walk: Walk) -> None:
    assert walk.tokens is not None
    number, _, height, width = walk.map.shape
    walk.map = transformer._get_output_for_continuous_inputs(
        walk.tokens, walk.map, batch_size=number, height=height, width=width, inner_dim=walk.tokens.shape[2]
    )
    walk.tokens = None

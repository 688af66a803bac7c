"""The layers of a diffusers UNet as a flat list in the order they run, and the pages that hold their outputs.

For mask-aware edits the output of every transformer block, residual block and up-sampler is cached, for all tokens (see
`unet_blocks.py`). All pages have one size: an output, written flat token by token, fills one page where the map is
small, and several where it is larger. Down-samplers and the deepest maps are computed whole, at negligible cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import groupby
from math import gcd
from typing import Any

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel

from core.model_info import BlockRun
from core.page_scheme import PageDtype, PageLayout
from model_executor.models.unet_blocks import Block, Compiled, Layer, ResidualBlock, TransformerBlock, UpSampler, Walk

TOKEN_SIDE = 4
"""Latent pixels per token side. Maps with fewer pixels than tokens are computed whole, at negligible cost."""

MAX_GROUP = 64
"""Upper limit on values that share a scale in int8 pages; the number used divides every map's channels."""


class Layers:
    """All layers between conv_in and conv_norm_out, in the order they run, with pages assigned to each `Block`."""

    def __init__(self, unet: Any, compiled: Compiled | None = None) -> None:
        """compiled: compiles the blocks' functions; None leaves them as they are."""
        deepest = len(unet.down_blocks) - 1
        self._layers = [*_down(unet), *_middle(unet.mid_block, deepest), *_up(unet, deepest)]
        self._kept = [layer for layer in self._layers if isinstance(layer, Block) and layer.side]
        self._unit = min(block.width for block in self._kept)
        self.num_pages = 0
        for block in self._kept:
            block.page, block.num_pages = self.num_pages, block.width // self._unit
            self.num_pages += block.num_pages
        if compiled is not None:
            once = cache(compiled)
            for block in self._kept:
                block.compute = once(block.compute)
        blocks = ((n, layer) for n, layer in enumerate(self._layers) if isinstance(layer, Block) and layer.side)
        self._ends = [(block.page + block.num_pages, n + 1) for n, block in blocks]  # pages and layers up to each

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


def _down(unet: Any) -> Iterator[Layer]:
    yield _keep
    for level, block in enumerate(unet.down_blocks):
        for number, resnet in enumerate(block.resnets):
            yield _residual(resnet, level)
            if hasattr(block, "attentions"):
                yield from _transformer(block.attentions[number], level)
            yield _keep
        for sampler in block.downsamplers or ():
            yield partial(_sample, sampler)
            yield _keep


def _middle(block: Any, level: int) -> Iterator[Layer]:
    first, *others = block.resnets
    yield _residual(first, level)
    for transformer, resnet in zip(block.attentions, others, strict=True):
        yield from _transformer(transformer, level)
        yield _residual(resnet, level)


def _up(unet: Any, deepest: int) -> Iterator[Layer]:
    for number, block in enumerate(unet.up_blocks):
        level = deepest - number
        for i, resnet in enumerate(block.resnets):
            yield _join
            yield _residual(resnet, level)
            if hasattr(block, "attentions"):
                yield from _transformer(block.attentions[i], level)
        for sampler in block.upsamplers or ():
            yield UpSampler(sampler, TOKEN_SIDE >> (level - 1))


def _residual(resnet: Any, level: int) -> Layer:
    """A residual block; computed whole (side 0) unless time is simply added to it."""
    is_plain = resnet.time_embedding_norm == "default" and not resnet.skip_time_act
    return ResidualBlock(resnet, TOKEN_SIDE >> level if is_plain else 0)


def _transformer(transformer: Transformer2DModel, level: int) -> Iterator[Layer]:
    yield partial(_enter, transformer)
    yield from (TransformerBlock(block, TOKEN_SIDE >> level) for block in transformer.transformer_blocks)
    yield partial(_leave, transformer)


def _keep(walk: Walk) -> None:
    walk.skips.append(walk.map)


def _join(walk: Walk) -> None:
    walk.map = torch.cat([walk.map, walk.skips.pop()], dim=1)


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

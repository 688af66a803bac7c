"""The layers of a UNet one after another, over diffusers' own: convolutions see the whole map, transformer blocks
compute some of its tokens.

A transformer block's keys and values are projected from the whole map, queries, attention's output and feed-forward
from the active tokens; what it gives for the others is a template's. That is what is kept of a UNet: each block's
output, of all tokens. Written flat, token by token, it fills one page where the map is small, and several where it is
larger, so that all pages are of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import gcd
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from core.block_plan import BlockRun
from core.page_scheme import PageDtype, PageLayout

TOKEN_SIDE = 4
"""Latent pixels per token side. Maps of fewer pixels than tokens are computed whole: they cost next to nothing."""

MAX_GROUP = 64
"""Values that share a scale in int8 pages, at most; a divisor of every map's channels."""


class Source(Protocol):
    """Where the outputs of tokens that a block does not compute come from, and where those of a template go."""

    def active(self, block: Block) -> Tensor | None:
        """The tokens of its map that the block computes, None for all."""

    def load(self, block: Block, tokens: Tensor) -> None:
        """Into each row of `tokens`, [rows, map tokens, channels], what is kept of the block."""

    def store(self, block: Block, tokens: Tensor) -> None:
        """What the block has given, of all tokens of each row, shaped likewise."""


@dataclass(slots=True)
class Walk:
    """Pictures of one size on their way through the layers, n of them.

    map: [n, channels, rows, columns]. tokens: [n, rows * columns, channels] within a transformer, whose input the map
    then is. skips: maps that layers on the way up read. time, text: [n, width] and [n, text tokens, width].
    """

    map: Tensor
    time: Tensor
    text: Tensor
    source: Source
    tokens: Tensor | None = None
    skips: list[Tensor] = field(default_factory=list)

    def pack(self) -> tuple[Tensor, ...]:
        """All that has come of it so far."""
        return (self.map, self.map.new_empty(len(self.map), 0) if self.tokens is None else self.tokens, *self.skips)

    def unpack(self, packed: Sequence[Tensor]) -> None:
        self.map, tokens, *self.skips = packed
        self.tokens = tokens if tokens.numel() else None


Layer = Callable[[Walk], None]


class Block:
    """A transformer block. side: tokens of its map per token of the picture, along a side; 0 where it has fewer tokens
    than the picture, and computes all of them. page, num_pages: where its output is kept. compute: `compute_active`,
    or what it was compiled to."""

    def __init__(self, module: Any, side: int) -> None:
        self._module, self.side = module, side
        self.compute: Callable[..., Tensor] = compute_active
        self.page = self.num_pages = 0

    @property
    def channels(self) -> int:
        return int(self._module.dim)

    def work(self, num_tokens: int) -> int:
        """Multiplications of computing all of its map, of a picture of so many tokens; text counts as nothing."""
        tokens, width = num_tokens * self.side**2, self.channels
        return tokens * width * (18 * width + 2 * tokens)

    def __call__(self, walk: Walk) -> None:
        assert walk.tokens is not None
        active = walk.source.active(self) if self.side else None
        if active is None:
            walk.tokens = computed = self._module(walk.tokens, encoder_hidden_states=walk.text)
            if self.side:
                walk.source.store(self, computed)
        else:
            fresh = self.compute(self._module, walk.tokens, active, walk.text)
            whole = walk.tokens.new_empty(walk.tokens.shape)
            walk.source.load(self, whole)
            walk.tokens = whole.index_copy_(1, active, fresh)


def compute_active(module: Any, tokens: Tensor, active: Tensor, text: Tensor) -> Tensor:
    """BasicTransformerBlock.forward for the active tokens, [n, active tokens, channels]."""
    some, normed = tokens[:, active], module.norm1(tokens)
    some = some + _attend(module.attn1, normed[:, active], normed)
    some = some + _attend(module.attn2, module.norm2(some), text)
    computed: Tensor = some + module.ff(module.norm3(some))
    return computed


def _attend(attention: Any, queries: Tensor, context: Tensor) -> Tensor:
    """AttnProcessor2_0 for queries of their own."""
    layers = (attention.to_q(queries), attention.to_k(context), attention.to_v(context))
    heads = (x.unflatten(2, (attention.heads, -1)).transpose(1, 2) for x in layers)
    attended: Tensor = attention.to_out[0](F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
    return attended


# ------------------------------------------------------------------------------------------------------------- layers


class Layers:
    """All between conv_in and conv_norm_out, in the order they run; each `Block` knows its pages."""

    def __init__(self, unet: Any, compute: Callable[..., Tensor] = compute_active) -> None:
        """compute: of the blocks."""
        deepest = len(unet.down_blocks) - 1
        self._layers = [*_down(unet), *_middle(unet.mid_block, deepest), *_up(unet, deepest)]
        for layer in self._layers:
            if isinstance(layer, Block):
                layer.compute = compute
        self._kept = [layer for layer in self._layers if isinstance(layer, Block) and layer.side]
        self._unit = min(block.channels * block.side**2 for block in self._kept)
        self.num_pages = 0
        for block in self._kept:
            block.page, block.num_pages = self.num_pages, block.channels * block.side**2 // self._unit
            self.num_pages += block.num_pages
        blocks = ((n, layer) for n, layer in enumerate(self._layers) if isinstance(layer, Block) and layer.side)
        self._ends = [(block.page + block.num_pages, n + 1) for n, block in blocks]  # pages and layers up to each

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        group = gcd(MAX_GROUP, self._unit // 2, *(block.channels for block in self._kept))
        return PageLayout(num_blocks=self.num_pages, num_heads=self._unit // 2 // group, head_dim=group, dtype=dtype)

    def block_runs(self, num_tokens: int) -> tuple[BlockRun, ...]:
        """What its blocks take, of a picture of so many tokens; those that compute all tokens anyway not counted."""
        total = sum(block.work(num_tokens) for block in self._kept)
        kinds = groupby((block.num_pages, block.work(num_tokens) / total) for block in self._kept)
        return tuple(BlockRun(len(list(equal)), *kind) for kind, equal in kinds)

    def run(self, walk: Walk, start: int = 0, stop: int | None = None) -> None:
        """Of the blocks, those whose last page is one of [start, stop), and what comes before them; None for all."""
        first = self._behind(start)
        for layer in self._layers[first : None if stop is None else self._behind(stop)]:
            layer(walk)

    def _behind(self, page: int) -> int:
        """How many layers come up to the last block whose pages are all before `page`."""
        return max((behind for end, behind in self._ends if end <= page), default=0)


def fill_whole_pages(config: Mapping[str, Any]) -> bool:
    """Whether the outputs of all transformer blocks of a UNet of this configuration are multiples of the smallest."""
    channels = config["block_out_channels"]
    widths = [n * (TOKEN_SIDE >> level) ** 2 for level, n in enumerate(channels)]
    has_blocks = [kind.startswith("CrossAttn") for kind in config["down_block_types"][:-1]] + [True]  # and the middle
    kept = [width for width, has in zip(widths, has_blocks, strict=True) if width and has]
    return all(width % min(kept) == 0 for width in kept)


def _down(unet: Any) -> Iterator[Layer]:
    yield _keep
    for level, block in enumerate(unet.down_blocks):
        for number, resnet in enumerate(block.resnets):
            yield partial(_resnet, resnet)
            if hasattr(block, "attentions"):
                yield from _transformer(block.attentions[number], level)
            yield _keep
        for sampler in block.downsamplers or ():
            yield partial(_sample, sampler)
            yield _keep


def _middle(block: Any, level: int) -> Iterator[Layer]:
    first, *others = block.resnets
    yield partial(_resnet, first)
    for transformer, resnet in zip(block.attentions, others, strict=True):
        yield from _transformer(transformer, level)
        yield partial(_resnet, resnet)


def _up(unet: Any, deepest: int) -> Iterator[Layer]:
    for number, block in enumerate(unet.up_blocks):
        for i, resnet in enumerate(block.resnets):
            yield partial(_join, resnet)
            if hasattr(block, "attentions"):
                yield from _transformer(block.attentions[i], deepest - number)
        for sampler in block.upsamplers or ():
            yield partial(_enlarge, sampler)


def _transformer(transformer: Transformer2DModel, level: int) -> Iterator[Layer]:
    yield partial(_enter, transformer)
    yield from (Block(block, TOKEN_SIDE >> level) for block in transformer.transformer_blocks)
    yield partial(_leave, transformer)


def _keep(walk: Walk) -> None:
    walk.skips.append(walk.map)


def _resnet(resnet: Any, walk: Walk) -> None:
    walk.map = resnet(walk.map, walk.time)


def _join(resnet: Any, walk: Walk) -> None:
    walk.map = resnet(torch.cat([walk.map, walk.skips.pop()], dim=1), walk.time)


def _sample(sampler: Any, walk: Walk) -> None:
    walk.map = sampler(walk.map)


def _enlarge(sampler: Any, walk: Walk) -> None:
    walk.map = sampler(walk.map, walk.skips[-1].shape[2:])


def _enter(transformer: Any, walk: Walk) -> None:
    walk.tokens, _ = transformer._operate_on_continuous_inputs(walk.map)


def _leave(transformer: Any, walk: Walk) -> None:
    assert walk.tokens is not None
    number, _, height, width = walk.map.shape
    walk.map = transformer._get_output_for_continuous_inputs(
        walk.tokens, walk.map, batch_size=number, height=height, width=width, inner_dim=walk.tokens.shape[2]
    )
    walk.tokens = None

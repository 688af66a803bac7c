"""Layers of a UNet of which a mask-aware step computes a part, over diffusers' own: what each gives for the rest of its
map is a template's, and that is what is kept of a UNet.

A transformer block's keys and values are projected from the whole map, queries, attention's output and feed-forward
from the active tokens.

Residual blocks and up-samplers are computed in the box of the active tokens and a little around it, over the template's
own maps, as SIGE does by tiles (Li et al. 2022, "Efficient Spatially Sparse Inference for Conditional GANs and
Diffusion Models", section 3): every layer gives a whole map, of its fresh box in the template's map, so that the next
one's convolution reads beyond the box what lies there. A residual block's first group norm takes its moments from the
whole map that it is given. Its second one sees a box alone, and of the rest it has the template's moments, token by
token, which are kept too; SIGE takes the template's for both, and for the whole map
(`diffusionmodules/sige_openaimodel.py` of its code). Between its two convolutions SIGE has the template's map too; here
a pixel more is computed instead of keeping that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_executor.kernels.cpu_layers import FastConv
from model_executor.models.boxes import Window


class Source(Protocol):
    """Where the outputs that a block does not compute come from, and where those of a template go.

    keeps: whether it wants them, of all tokens.
    """

    keeps: bool

    def active(self, block: Block) -> Tensor | None:
        """The tokens of its map that a transformer block computes, None for all."""

    def window(self, block: Block) -> Window | None:
        """The pixels of its map that another block computes, None for all."""

    def load(self, block: Block, tokens: Tensor) -> None:
        """Into each row of `tokens`, [rows, map tokens, channels], what is kept of the block."""

    def moments(self, block: Block) -> Tensor:
        """Mean and variance of each group that a residual block's second norm has seen of the template outside the
        window, float32 [2, groups]."""

    def store(self, block: Block, tokens: Tensor, moments: Tensor | None = None) -> None:
        """What the block has given, of all tokens of each row, shaped likewise, and each row's moments, [rows, numbers,
        image tokens]."""


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

Compiled = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
"""Makes of a function of modules and tensors one that is faster."""


class Block(ABC):
    """A layer whose output is kept.

    side: tokens (or pixels) of its output's map per token of the picture, along a side; 0 where all are computed and
    none kept, as where there are fewer than tokens of the picture. channels: of its output. page, num_pages: where this
    is kept. num_moments: numbers that are kept beside it. compute: what gives a part of its map, or that compiled.
    """

    def __init__(self, module: Any, side: int, channels: int, compute: Callable[..., Tensor]) -> None:
        self._module, self.side, self.channels, self.compute = module, side, channels, compute
        self.page = self.num_pages = self.num_moments = 0

    @property
    def width(self) -> int:
        """Numbers of its output per token of the picture."""
        return self.channels * self.side**2

    @abstractmethod
    def work(self, num_tokens: int) -> int:
        """Multiplications of computing all of its map, of a picture of so many tokens; text counts as nothing."""

    @abstractmethod
    def __call__(self, walk: Walk) -> None:
        """Take all pictures through it."""

    def _loaded(self, source: Source, like: Tensor, num_tokens: int) -> Tensor:
        """What is kept of it, [n, map tokens, channels]. like: what was computed of it."""
        tokens = like.new_empty(len(like), num_tokens, self.channels)
        source.load(self, tokens)
        return tokens


class TransformerBlock(Block):
    """Its module is a BasicTransformerBlock."""

    def __init__(self, module: Any, side: int) -> None:
        super().__init__(module, side, int(module.dim), compute_active)

    def work(self, num_tokens: int) -> int:
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
            walk.tokens = self._loaded(walk.source, fresh, walk.tokens.shape[1]).index_copy_(1, active, fresh)


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


class ConvolutionalBlock(Block):
    """Computes a box."""

    def __call__(self, walk: Walk) -> None:
        window = walk.source.window(self) if self.side else None
        if window is not None:
            fresh, (rows, columns) = self._in_window(walk, window), window.size
            tokens = self._loaded(walk.source, fresh, rows * columns)
            walk.map = tokens.unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
            window.cut(walk.map).copy_(fresh)
        elif self.side and walk.source.keeps:
            walk.map, moments = self._primed(walk)
            walk.source.store(self, walk.map.permute(0, 2, 3, 1).contiguous().flatten(1, 2), moments)
        else:
            walk.map = self._whole(walk)

    @abstractmethod
    def _whole(self, walk: Walk) -> Tensor:
        """Its output's map."""

    @abstractmethod
    def _primed(self, walk: Walk) -> tuple[Tensor, Tensor | None]:
        """Likewise, and each row's moments, where it has any."""

    @abstractmethod
    def _in_window(self, walk: Walk, window: Window) -> Tensor:
        """The window's pixels of it."""


class ResidualBlock(ConvolutionalBlock):
    """Its module is a ResnetBlock2D that keeps the map's size and, where anything of it is kept, adds time's embedding.

    Its moments are, for each token's cell of the map, each group's mean and standard deviation before its second norm:
    whatever box is computed, those outside can be told. (A deviation fits a float16 where a mean square may not, and
    each may be interpolated by itself: what that neglects between two keyframes is of second order.)
    """

    def __init__(self, module: Any, side: int) -> None:
        super().__init__(module, side, int(module.out_channels), compute_residual)
        self._convolutions = unpadded(module.conv1), unpadded(module.conv2)
        self.num_moments = 2 * int(module.norm2.num_groups)

    def work(self, num_tokens: int) -> int:
        before, after = int(self._module.in_channels), self.channels
        shortcut = 0 if self._module.conv_shortcut is None else before
        return num_tokens * self.side**2 * after * (9 * (before + after) + shortcut)

    def _whole(self, walk: Walk) -> Tensor:
        computed: Tensor = self._module(walk.map, walk.time)
        return computed

    def _primed(self, walk: Walk) -> tuple[Tensor, Tensor]:
        """ResnetBlock2D.forward."""
        resnet = self._module
        hidden = resnet.conv1(resnet.nonlinearity(resnet.norm1(walk.map))) + embedded(resnet, walk.time)
        moments = cell_moments(hidden, resnet.norm2.num_groups, self.side)
        hidden = resnet.conv2(resnet.nonlinearity(resnet.norm2(hidden)))
        return joined(resnet, walk.map, hidden), moments

    def _in_window(self, walk: Walk, window: Window) -> Tensor:
        normed = window.cut_grown(self._module.norm1(walk.map), 2)
        picture = window.cut(walk.map), normed, window.edge
        moments = walk.source.moments(self), window.share
        return self.compute(self._module, self._convolutions, *picture, walk.time, *moments)


def compute_residual(
    resnet: Any,
    convolutions: tuple[nn.Module, nn.Module],
    own: Tensor,
    normed: Tensor,
    edge: Tensor,
    time: Tensor,
    outside: Tensor,
    share: Tensor,
) -> Tensor:
    """ResnetBlock2D.forward for a window's pixels. convolutions: its own two, unpadded. own: the input. normed: that
    after its first norm, with two pixels around it, zeros beyond the map: the activation leaves them zeros, as the
    convolution has it. outside: `Source.moments`. edge, share: the window's."""
    hidden = convolutions[0](resnet.nonlinearity(normed)) + embedded(resnet, time)
    moments = with_box(outside, hidden[:, :, 1:-1, 1:-1], share)
    hidden = resnet.nonlinearity(normalised(resnet.norm2, hidden, moments)) * edge
    return joined(resnet, own, convolutions[1](hidden))


def embedded(resnet: Any, time: Tensor) -> Tensor:
    """What the time adds to each pixel, [n, channels, 1, 1]."""
    projected: Tensor = resnet.time_emb_proj(resnet.nonlinearity(time))
    return projected[:, :, None, None]


def joined(resnet: Any, own: Tensor, hidden: Tensor) -> Tensor:
    """A residual block's output of its input and what it has computed."""
    shortcut = own if resnet.conv_shortcut is None else resnet.conv_shortcut(own)
    output: Tensor = (shortcut + hidden) / resnet.output_scale_factor
    return output


def cell_moments(x: Tensor, num_groups: int, side: int) -> Tensor:
    """Each picture's mean and standard deviation of each group of channels in each cell of side * side pixels, float32
    [n, 2 * groups, cells]."""
    cells = x.float().unflatten(3, (-1, side)).unflatten(2, (-1, side)).unflatten(1, (num_groups, -1))
    deviation, mean = torch.std_mean(cells, dim=(2, 4, 6), correction=0)
    return torch.cat([mean, deviation], dim=1).flatten(2)


def pooled(mean: Tensor, variance: Tensor, weights: Tensor) -> Tensor:
    """Mean and variance, [2, groups], of parts taken together. mean, variance: [groups, parts]. weights: of the parts,
    1 in sum."""
    whole = mean @ weights
    return torch.stack([whole, (variance + (mean - whole[:, None]).square()) @ weights])


def with_box(outside: Tensor, box: Tensor, share: Tensor) -> Tensor:
    """Each picture's mean and variance of each group, [2, n, groups], of a map of which a box is known, [n, channels,
    rows, columns], and of the rest these moments, [2, groups]. share: the box's."""
    mean, variance = _moments_of(box, outside.shape[1])
    apart = mean - outside[0]
    between = share * (1 - share) * apart.square()
    return torch.stack([outside[0] + share * apart, torch.lerp(outside[1], variance, share) + between])


def _moments_of(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Each picture's mean and variance of each group, float32 [n, groups]. Channel by channel and pixels outermost, as
    a map lies in memory: `torch.var_mean` took ten times as long on a CPU."""
    pixels = x.permute(0, 2, 3, 1).float().flatten(1, 2)
    mean = pixels.mean(1, keepdim=True)
    variance = (pixels - mean).square().mean(1).unflatten(1, (num_groups, -1))
    means = mean[:, 0].unflatten(1, (num_groups, -1))
    return means.mean(2), variance.mean(2) + means.var(2, correction=0)


def normalised(norm: nn.GroupNorm, x: Tensor, moments: Tensor) -> Tensor:
    """Group norm with these moments, [2, n, groups]."""
    mean, variance = moments.repeat_interleave(x.shape[1] // norm.num_groups, dim=2)
    factor = norm.weight * torch.rsqrt(variance + norm.eps)
    shift = norm.bias - mean * factor
    return torch.addcmul(shift[..., None, None], x, factor[..., None, None]).to(x.dtype)


class UpSampler(ConvolutionalBlock):
    """Its module is an Upsample2D: repetition, then a convolution. `side` is that of the larger map."""

    def __init__(self, module: Any, side: int) -> None:
        super().__init__(module, side, int(module.out_channels), compute_larger)
        self._convolution = unpadded(module.conv)

    def work(self, num_tokens: int) -> int:
        return num_tokens * self.side**2 * 9 * int(self._module.channels) * self.channels

    def _whole(self, walk: Walk) -> Tensor:
        computed: Tensor = self._module(walk.map, walk.skips[-1].shape[2:])
        return computed

    def _primed(self, walk: Walk) -> tuple[Tensor, None]:
        return self._whole(walk), None

    def _in_window(self, walk: Walk, window: Window) -> Tensor:
        return self.compute(self._convolution, window.cut_grown_twice_as_large(walk.map, 1))


def compute_larger(convolution: nn.Module, around: Tensor) -> Tensor:
    """A window's pixels of an enlarged map. convolution: unpadded. around: the window with a pixel around it."""
    computed: Tensor = convolution(around)
    return computed


def unpadded(layer: nn.Module) -> nn.Module:
    """A convolution, an adapted one too, that gives only what it need not pad its input for; they share weights."""
    twin = copy(layer)
    twin._modules = {name: unpadded(child) for name, child in layer.named_children()}
    if isinstance(twin, nn.Conv2d | FastConv):
        twin.padding = (0, 0)
    return twin

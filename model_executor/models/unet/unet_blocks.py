"""The blocks of a UNet that a mask-aware step computes in part, over diffusers' own layers. The rest of a block's
output is the template's, read from pages: a UNet's pages hold outputs of blocks.

Transformer blocks project keys and values from the whole map; queries, attention output and feed-forward are computed
for the active tokens.

Residual blocks and up-samplers compute a box around the active tokens, slightly enlarged, and write it into the
template's map, as SIGE does by tiles (Li et al. 2022, "Efficient Spatially Sparse Inference for Conditional GANs and
Diffusion Models", section 3). Each layer thus gives a whole map, so the next convolution reads the template's values
beyond the box. A residual block's first group norm takes its moments from the whole map that it is given. The second
sees the box alone; for the rest it uses the template's moments, which are cached per token. SIGE uses the template's
moments for both norms and for the whole map (`diffusionmodules/sige_openaimodel.py` in its code). SIGE also caches the
map between the two convolutions; here one more pixel around the box is computed instead.
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
from model_executor.models.base import Streamed
from model_executor.models.boxes import Box, Window, cut, times

TOKEN_SIDE = 4
"""Latent pixels per token side. Maps with fewer pixels than tokens are computed whole, at negligible cost."""


class UnetSource(Protocol):
    """Supplies the outputs that blocks do not compute, or takes those of templates that are primed."""

    keeps: bool
    """Whether `store` takes the blocks' outputs, which must then be computed for all tokens."""

    def active(self, block: UnetBlock) -> Tensor | None:
        """The tokens of its map that a transformer block is to compute, None for all."""

    def window(self, block: UnetBlock) -> Window | None:
        """The box of its map that a convolutional block is to compute, None for all."""

    def load(self, block: UnetBlock, tokens: Tensor) -> None:
        """Read the block's pages into each row of `tokens`, [rows, map tokens, channels]."""

    def moments(self, block: UnetBlock) -> Tensor:
        """The template's mean and variance outside the window, for each group of a residual block's second norm,
        float32 [2, groups]."""

    def store(self, block: UnetBlock, tokens: Tensor, moments: Tensor | None = None) -> None:
        """Take the block's output, [rows, map tokens, channels], and each row's moments, [rows, numbers, image
        tokens]."""


@dataclass(frozen=True, slots=True)
class Steering:
    """What other models add to the maps that the way up reads."""

    streamed: Sequence[Streamed]  # of each row
    box: Box | None  # of the picture in tokens, for which it is added; None: for all of it
    grid: tuple[int, int]  # image tokens as (rows, columns)

    def add_to(self, x: Tensor, number: int) -> Tensor:
        """A map [n, channels, rows, columns], with what is added to it. number: see `Streamed`."""
        found = [streamed(number) for streamed in self.streamed]
        added = torch.stack([each for each in found if each is not None])
        if self.box is None:
            return x + added
        steered = x.clone()
        left, top = self._corner(x.shape[3])
        rows, columns = added.shape[2:]
        cut(steered, (left, top, left + columns, top + rows)).add_(added)
        return steered

    def _corner(self, columns: int) -> tuple[int, int]:
        """Left and top of the box in a map of this width."""
        assert self.box is not None
        halvings = 0
        while -(-self.grid[1] * TOKEN_SIDE // 2**halvings) > columns:
            halvings += 1
        left, top, _, _ = times(self.box, TOKEN_SIDE)
        return left >> halvings, top >> halvings


@dataclass(slots=True)
class Walk:
    """The state of n pictures of one size as they pass through the layers."""

    map: Tensor  # [n, channels, rows, columns]; within a transformer its input
    time: Tensor  # the timesteps' embedding, [n, width]
    text: Tensor  # [n, text tokens, width]
    source: UnetSource
    shifts: Tensor | None = None  # `time` as `Layers.project` returns it; None: each block projects it
    keys_values: Tensor | None = None  # `text` as `Layers.keys_values` returns it; None: each block projects it
    steering: Steering | None = None  # None: nothing is added
    tokens: Tensor | None = None  # [n, rows * columns, channels], within a transformer only
    skips: list[Tensor] = field(default_factory=list)  # maps of the way down that the way up will read

    def pack(self) -> tuple[Tensor, ...]:
        """The tensors from which a later walk can continue: map, tokens (empty if None), skips."""
        return (self.map, self.map.new_empty(len(self.map), 0) if self.tokens is None else self.tokens, *self.skips)

    def unpack(self, packed: Sequence[Tensor]) -> None:
        self.map, tokens, *self.skips = packed
        self.tokens = tokens if tokens.numel() else None


Layer = Callable[[Walk], None]

Compiled = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
"""Compiles a function of modules and tensors."""


class UnetBlock(ABC):
    """A layer whose output is cached in pages.

    side: pixels of its output's map per token of the picture, along a side; 0 for blocks that are computed whole and
    have no pages, such as those with fewer pixels than tokens. channels: of its output. page, num_pages: its pages, set
    by `Layers`. num_moments: numbers cached per token beside the output. compute: the function that computes a part of
    the map, possibly compiled.
    """

    def __init__(self, module: Any, side: int, channels: int, compute: Callable[..., Tensor]) -> None:
        self._module, self.side, self.channels, self.compute = module, side, channels, compute
        self.page = self.num_pages = self.num_moments = 0

    @property
    def width(self) -> int:
        """Numbers in its output per token of the picture."""
        return self.channels * self.side**2

    @abstractmethod
    def work(self, num_tokens: int) -> int:
        """Multiplications to compute its whole map, for a picture of `num_tokens`, without those over text."""

    @abstractmethod
    def __call__(self, walk: Walk) -> None:
        """Advance all pictures through this block."""

    def _loaded(self, source: UnetSource, like: Tensor, num_tokens: int) -> Tensor:
        """Its cached output, [n, map tokens, channels]. like: its computed part, for batch size, dtype and device."""
        tokens = like.new_empty(len(like), num_tokens, self.channels)
        source.load(self, tokens)
        return tokens


class TransformerBlock(UnetBlock):
    """A diffusers BasicTransformerBlock, which computes the active tokens."""

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
    """As AttnProcessor2_0, with queries computed from other tokens than keys and values."""
    return attended_by(attention, attention.to_q(queries), attention.to_k(context), attention.to_v(context))


def attended_by(attention: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What an attention layer makes of its products, [n, tokens, channels] each."""
    heads = (x.unflatten(2, (attention.heads, -1)).transpose(1, 2) for x in (queries, keys, values))
    attended: Tensor = attention.to_out[0](F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
    return attended


class ConvolutionalBlock(UnetBlock):
    """Base of the blocks that compute a box of their map."""

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
        """Its whole output map."""

    @abstractmethod
    def _primed(self, walk: Walk) -> tuple[Tensor, Tensor | None]:
        """Its whole output map and each row's moments, None for a block without."""

    @abstractmethod
    def _in_window(self, walk: Walk, window: Window) -> Tensor:
        """The window's pixels of its output map."""


class ResidualBlock(ConvolutionalBlock):
    """A diffusers ResnetBlock2D that keeps the map's size; one with pages adds time's embedding.

    Its moments are the mean and standard deviation of each group before the second norm, for each token's cell of the
    map, so that those outside any box can be computed. Deviations, unlike mean squares, always fit float16. Mean and
    deviation are interpolated separately between keyframes, which neglects a term of second order.
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
        """As ResnetBlock2D.forward, with the moments on the way."""
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
    """As ResnetBlock2D.forward, for a window's pixels. convolutions: its own two, unpadded. own: the input. normed: the
    input after the first norm, with two pixels around the window, zeros beyond the map; the activation keeps them zero,
    as the convolution's padding is. outside: `UnetSource.moments`. edge, share: the window's."""
    hidden = convolutions[0](resnet.nonlinearity(normed)) + embedded(resnet, time)
    moments = with_box(outside, hidden[:, :, 1:-1, 1:-1], share)
    hidden = resnet.nonlinearity(normalised(resnet.norm2, hidden, moments)) * edge
    return joined(resnet, own, convolutions[1](hidden))


def embedded(resnet: Any, time: Tensor) -> Tensor:
    """The embedding of time that is added to each pixel, [n, channels, 1, 1]."""
    projected: Tensor = resnet.time_emb_proj(resnet.nonlinearity(time))
    return projected[:, :, None, None]


def joined(resnet: Any, own: Tensor, hidden: Tensor) -> Tensor:
    """A residual block's output: its input (through the shortcut, if any) plus what its layers computed."""
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
    """Mean and variance of all parts together, [2, groups]. mean, variance: of each part, [groups, parts]. weights: of
    the parts, summing to 1."""
    whole = mean @ weights
    return torch.stack([whole, (variance + (mean - whole[:, None]).square()) @ weights])


def with_box(outside: Tensor, box: Tensor, share: Tensor) -> Tensor:
    """Each picture's mean and variance of each group over the whole map, [2, n, groups]. box: the map's known part, [n,
    channels, rows, columns]. outside: the moments of the rest, [2, groups]. share: of the map that the box covers."""
    mean, variance = _moments_of(box, outside.shape[1])
    apart = mean - outside[0]
    between = share * (1 - share) * apart.square()
    return torch.stack([outside[0] + share * apart, torch.lerp(outside[1], variance, share) + between])


def _moments_of(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Each picture's mean and variance of each group, float32 [n, groups]. Computed per channel with pixels outermost,
    as maps lie in memory: `torch.var_mean` took ten times as long on a CPU."""
    pixels = x.permute(0, 2, 3, 1).float().flatten(1, 2)
    mean = pixels.mean(1, keepdim=True)
    variance = (pixels - mean).square().mean(1).unflatten(1, (num_groups, -1))
    means = mean[:, 0].unflatten(1, (num_groups, -1))
    return means.mean(2), variance.mean(2) + means.var(2, correction=0)


def normalised(norm: nn.GroupNorm, x: Tensor, moments: Tensor) -> Tensor:
    """Group norm with given moments, [2, n, groups]."""
    mean, variance = moments.repeat_interleave(x.shape[1] // norm.num_groups, dim=2)
    factor = norm.weight * torch.rsqrt(variance + norm.eps)
    shift = norm.bias - mean * factor
    return torch.addcmul(shift[..., None, None], x, factor[..., None, None]).to(x.dtype)


class UpSampler(ConvolutionalBlock):
    """A diffusers Upsample2D: repetition, then a convolution. `side` is that of the larger map."""

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
    """A window's pixels of an enlarged map. convolution: unpadded. around: the window and one pixel around it."""
    computed: Tensor = convolution(around)
    return computed


def unpadded(layer: nn.Module) -> nn.Module:
    """A copy of a convolution, possibly with an adapter, that does not pad its input; they share weights."""
    twin = copy(layer)
    twin._modules = {name: unpadded(child) for name, child in layer.named_children()}
    if isinstance(twin, nn.Conv2d | FastConv):
        twin.padding = (0, 0)
    return twin

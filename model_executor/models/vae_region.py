"""Decoding with a diffusers `AutoencoderKL`: the whole picture in less time, and only the part that an edit changed.

The whole picture follows `Decoder.forward` of diffusers/models/autoencoders/vae.py over the module's own layers. One
change costs float rounding and nothing else: the convolution of a map enlarged by repetition is done as four
convolutions of the small map, one for each pixel of a 2x2 patch, with 4/9 of the multiplications.

A part of the picture needs little beside itself. All but the last two resolutions are decoded whole: they are cheap
and carry most of the receptive field. From there on there is a crop. What it cannot know are the statistics of the
group norms, for those are the whole picture's. They are estimated from the crop, which is exact, and for the rest from
a sparse mosaic: every other token of every other row, set side by side and taken through the same layers. No value
comes from anywhere but the latents, so the same latents and tokens give the same pixels, always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Box = tuple[int, int, int, int]
"""left, top, right, bottom."""

CROPPED_BLOCKS = 2
"""Up blocks that are computed for a crop only: the last ones, where most of the time goes."""

CELLS_PER_TOKEN = 4
"""Cells are the pixels of the last map that is computed whole; a token has 4x4 where one up block precedes the crop."""

STRIDE = 2 * CELLS_PER_TOKEN
"""Cells from one sampled token to the next."""

WORTH = 0.8
"""Largest share of the picture's cells that may be computed; beyond it everything is, in the same time."""


class RegionDecoder:
    """The decoder of `vae`, whose weights must stay as they are from here on."""

    def __init__(self, vae: Any) -> None:
        self._decoder = vae.decoder
        self._post_quant = nn.Identity() if vae.post_quant_conv is None else vae.post_quant_conv
        self._blocks = list(self._decoder.up_blocks)
        self._upsamplers = [_upsampler(block.upsamplers[0]) if block.upsamplers else _same for block in self._blocks]
        self._first = len(self._blocks) - CROPPED_BLOCKS - 1
        self._halo = _halo(self._blocks)

    def decode(self, latents: Tensor) -> Tensor:
        """[1, channels, rows, columns], in the VAE's own range -> [1, 3, height, width], about -1..1."""
        return self._finish(_Maps((self._whole(latents, len(self._blocks)),)))

    def region(self, tokens: Box, grid: tuple[int, int]) -> Region | None:
        """How to decode the pixels of a box of tokens, of a picture of `grid` (rows, columns); None where decoding the
        whole takes no longer, or where the decoder is not of the form that tokens and cells are counted in."""
        if self._first != 1:
            return None
        region = Region.around(tokens, grid, self._halo)
        return region if region.is_estimable and region.work <= WORTH else None

    def decode_region(self, latents: Tensor, region: Region) -> Tensor:
        """The pixels of the region's tokens, [1, 3, height, width], about -1..1."""
        whole = _resnets(self._blocks[self._first], _Maps((self._whole(latents, self._first),)))
        maps = region.cut(*whole.parts).through(self._upsamplers[self._first])
        for block, upsampler in list(zip(self._blocks, self._upsamplers, strict=True))[self._first + 1 :]:
            maps = _resnets(block, maps).through(upsampler)
        return region.trim(self._finish(maps))

    def _whole(self, latents: Tensor, num_blocks: int) -> Tensor:
        """The whole picture's map after so many up blocks."""
        maps = _Maps((self._decoder.mid_block(self._decoder.conv_in(self._post_quant(latents)), None),))
        for block, upsampler in list(zip(self._blocks, self._upsamplers, strict=True))[:num_blocks]:
            maps = _resnets(block, maps).through(upsampler)
        return maps.parts[0]

    def _finish(self, maps: _Maps) -> Tensor:
        normed = maps.normed(self._decoder.conv_norm_out, self._decoder.conv_act)
        pixels: Tensor = self._decoder.conv_out(normed.parts[0])
        return pixels


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a picture, counted in cells.

    inside: the box asked for. crop: that and a halo. grid: all cells as (rows, columns). sampled: int64 rows and
    columns of the mosaic. hole: the part of the mosaic that comes from the crop, as a box in the mosaic's cells.
    """

    inside: Box
    crop: Box
    grid: tuple[int, int]
    sampled: tuple[Tensor, Tensor]
    hole: Box

    @classmethod
    def around(cls, tokens: Box, grid: tuple[int, int], halo: int) -> Region:
        left, top, right, bottom = inside = times(tokens, CELLS_PER_TOKEN)
        rows, columns = grid[0] * CELLS_PER_TOKEN, grid[1] * CELLS_PER_TOKEN
        crop = (max(left - halo, 0), max(top - halo, 0), min(right + halo, columns), min(bottom + halo, rows))
        sampled = _sampled(rows), _sampled(columns)
        x, y = _span(sampled[1], crop[0], crop[2]), _span(sampled[0], crop[1], crop[3])
        return cls(inside, crop, (rows, columns), sampled, (x[0], y[0], x[1], y[1]))

    @property
    def work(self) -> float:
        """Cells that are computed, as a share of all."""
        return self.share + len(self.sampled[0]) * len(self.sampled[1]) / (self.grid[0] * self.grid[1])

    @property
    def share(self) -> float:
        """Cells of the crop, as a share of all."""
        return _area(self.crop) / (self.grid[0] * self.grid[1])

    @property
    def is_estimable(self) -> bool:
        """Whether the mosaic tells anything that the crop does not."""
        return _area(self.hole) < len(self.sampled[0]) * len(self.sampled[1])

    def cut(self, whole: Tensor) -> _Maps:
        rows, columns = (index.to(whole.device) for index in self.sampled)
        mosaic = whole.index_select(2, rows).index_select(3, columns)
        left, top, right, bottom = self.crop
        crop = whole[:, :, top:bottom, left:right].contiguous(memory_format=torch.channels_last)
        return _Maps((crop, mosaic.contiguous(memory_format=torch.channels_last)), self)

    def statistics(self, crop: Tensor, mosaic: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
        """Estimated mean and variance of the whole picture's groups, float32, one of each per channel."""
        scale = mosaic.shape[2] // len(self.sampled[0])
        here = _sums(crop, num_groups)
        rest = _sums(mosaic, num_groups) - _sums(_cut(mosaic, times(self.hole, scale)), num_groups)
        _, mean, square = self.share * here / here[0] + (1.0 - self.share) * rest / rest[0]
        per_group = crop.shape[1] // num_groups
        return mean.repeat_interleave(per_group), (square - mean * mean).clamp_min(0.0).repeat_interleave(per_group)

    def trim(self, pixels: Tensor) -> Tensor:
        """The crop without its halo."""
        left, top, _, bottom = self.crop
        scale = pixels.shape[2] // (bottom - top)
        inside = (self.inside[0] - left, self.inside[1] - top, self.inside[2] - left, self.inside[3] - top)
        return _cut(pixels, times(inside, scale))


@dataclass(frozen=True, slots=True)
class _Maps:
    """The map of a whole picture; or with `region`, that of its crop and that of the mosaic."""

    parts: tuple[Tensor, ...]
    region: Region | None = None

    def through(self, layer: Callable[[Tensor], Tensor]) -> _Maps:
        return replace(self, parts=tuple(layer(part) for part in self.parts))

    def plus(self, other: _Maps) -> _Maps:
        return replace(self, parts=tuple(a + b for a, b in zip(self.parts, other.parts, strict=True)))

    def normed(self, norm: nn.GroupNorm, activation: Callable[[Tensor], Tensor]) -> _Maps:
        """Group norm with the whole picture's statistics, and an activation."""
        if self.region is None:
            return self.through(lambda x: activation(norm(x)))
        crop, mosaic = self.parts
        mean, variance = self.region.statistics(crop, mosaic, norm.num_groups)
        weight, bias = norm.weight.float(), norm.bias.float()
        batch_norm = nn.functional.batch_norm  # at given statistics: one pass over the map
        return self.through(lambda x: activation(batch_norm(x, mean, variance, weight, bias, eps=norm.eps)))


def _resnets(block: Any, maps: _Maps) -> _Maps:
    """diffusers' ResnetBlock2D.forward without a time embedding, for each of an up block's."""
    for resnet in block.resnets:
        hidden = maps.normed(resnet.norm1, resnet.nonlinearity).through(resnet.conv1)
        hidden = hidden.normed(resnet.norm2, resnet.nonlinearity).through(resnet.conv2)
        maps = (maps if resnet.conv_shortcut is None else maps.through(resnet.conv_shortcut)).plus(hidden)
    return maps


def _sums(x: Tensor, num_groups: int) -> Tensor:
    """Per group: how many values, their sum and the sum of their squares; float32 [3, groups]."""
    x = x.float()
    values = x.sum((0, 2, 3)).view(num_groups, -1).sum(1)
    squares = x.square().sum((0, 2, 3)).view(num_groups, -1).sum(1)
    return torch.stack([torch.full_like(values, x.numel() / num_groups), values, squares])


def _upsampler(module: Any) -> Callable[[Tensor], Tensor]:
    """diffusers' Upsample2D: nearest neighbours, then a 3x3 convolution.

    Of an enlarged map, the pixels (2y + i, 2x + j) see only 2x2 different values, so their convolution is one of the
    small map by a 2x2 kernel, in which weights that fall on the same value are added.
    """
    weight = module.conv.weight.float()
    rows = [_folded(weight, 2, i) for i in (0, 1)]
    folded = torch.cat([_folded(row, 3, j) for row in rows for j in (0, 1)]).to(module.conv.weight.dtype)
    return partial(_upsample, folded.contiguous(memory_format=torch.channels_last), module.conv.bias.repeat(4))


def _folded(weight: Tensor, dim: int, phase: int) -> Tensor:
    """A kernel of 3 along `dim` as one of 2: the first or second pixel of a pair sees its own value twice."""
    first, middle, last = weight.unbind(dim)
    pair = (first, middle + last) if phase == 0 else (first + middle, last)
    return torch.stack(pair, dim)


def _upsample(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """[1, channels, rows, columns] -> [1, channels, 2 rows, 2 columns]."""
    _, _, rows, columns = x.shape
    phases = nn.functional.conv2d(x, weight, bias, padding=1).chunk(4, dim=1)
    shape = (1, phases[0].shape[1], 2 * rows, 2 * columns)
    enlarged = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    for i in (0, 1):
        for j in (0, 1):
            enlarged[:, :, i::2, j::2] = phases[2 * i + j][:, :, i : i + rows, j : j + columns]
    return enlarged


def _same(x: Tensor) -> Tensor:
    return x


def _halo(blocks: list[Any]) -> int:
    """Cells around the inside: half the receptive field of what follows. In the other half nothing was seen to matter:
    with true statistics, 4 of 255 at most and 0.002 in the mean."""
    pixels = 0.0
    for i, block in enumerate(reversed(blocks[-CROPPED_BLOCKS:])):
        convolutions = 1 + 2 * len(block.resnets) + (i == 0)
        pixels += convolutions / 2 ** (CROPPED_BLOCKS - i)
    return round(pixels / 2)


def _sampled(size: int) -> Tensor:
    """Cells of every other token, with half of the gap before the first."""
    cells = torch.arange(size)
    return cells[(cells - (STRIDE - CELLS_PER_TOKEN) // 2) % STRIDE < CELLS_PER_TOKEN]


def _span(index: Tensor, start: int, stop: int) -> tuple[int, int]:
    """Where the ascending `index` lies in start..stop."""
    return int((index < start).sum()), int((index < stop).sum())


def _area(box: Box) -> int:
    left, top, right, bottom = box
    return (right - left) * (bottom - top)


def times(box: Box, factor: int) -> Box:
    """A box counted in units so many times smaller."""
    left, top, right, bottom = box
    return left * factor, top * factor, right * factor, bottom * factor


def _cut(x: Tensor, box: Box) -> Tensor:
    left, top, right, bottom = box
    return x[:, :, top:bottom, left:right]

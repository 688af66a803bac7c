"""Pages as tensors: writes a block's keys and values into an entry, and reads them back at any noise level.

`core.page_scheme` defines the memory layout of an entry. The code here works on views of those bytes and copies only
what a block's attention needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from core.page_scheme import PageDtype, PageLayout
from model_executor.kernels.attention import KeysValues
from model_executor.kernels.cpu_kernels import Kernels, Keyframe, PageKernels, can_read
from model_executor.kernels.tile_attention import PlacedKeysValues

INT8_MAX = 127

Quantise = Callable[[Tensor, Tensor, Tensor], None]
"""(x, values, scales): quantises x to int8, as the function `quantise`."""

_DTYPES: dict[PageDtype, torch.dtype] = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MOMENT_DTYPES: dict[PageDtype, torch.dtype] = {
    "int8": torch.float16,
    "bfloat16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where a GPU's kernels find the entries of two keyframes, and their weights. Kernels read it at run time, so a
    CUDA graph can be replayed with other pages."""

    addresses: Tensor  # int64 [2], of the near and the far entry in device memory; any readable ones at weight 0
    weights: Tensor  # float32 [2], of near and far; what has weight 0 is not read


@dataclass(frozen=True, slots=True)
class Pages:
    """A template's pages at one noise level: (1 - weight) * near + weight * far."""

    layout: PageLayout
    num_tokens: int  # image tokens of the picture
    near: Tensor  # the entry of the nearest keyframe, uint8 [entry bytes]
    far: Tensor | None  # that of the keyframe to interpolate with; None exactly at a keyframe
    weight: float  # of far, 0..1
    wait: Callable[[int], None] | None = None  # blocks until a block may be read; None: all are loaded
    heads: tuple[int, int] | None = None  # (first, after the last) of those that are read; None: all
    table: PageTable | None = None  # read instead of `near`, `far` and `weight` by a GPU's kernels; None: they make one

    def open(self, kernels: PageKernels | None = None) -> PageReader:
        """A reader of these pages. The entries' bytes must not change while it is used."""
        return PageReader(self, kernels)


class Reader(Protocol):
    """Reads a template's pages block by block, interpolated to their noise level."""

    def read(self, block: int, out: Tensor) -> None:
        """Read keys and values of a block into `out`, [2, heads, tokens, head dim] of any float dtype. Computed in
        float32."""

    def read_over(self, block: int, keys_values: KeysValues, fresh: Tensor, rows: Tensor) -> None:
        """Read keys and values of a block into the image part of `keys_values`, then write `fresh`, what was computed,
        [rows, 2, heads, head dim], to these rows of it, text before image."""

    def moments(self, block: int) -> Tensor:
        """A block's moments, float32 [numbers, image tokens]."""


class PageReader:
    """Reads with PyTorch and compiled kernels. Views of all blocks are made in advance. The weights of the two
    keyframes are multiplied into their scales: in advance too, or for each block when it has arrived."""

    def __init__(self, pages: Pages, kernels: PageKernels | None) -> None:
        self._kernels = kernels
        near = PageEntry(pages.near, pages.layout, pages.num_tokens).of_heads(pages.heads)
        far = None if pages.far is None else PageEntry(pages.far, pages.layout, pages.num_tokens).of_heads(pages.heads)
        self._wait, self._weight = pages.wait, pages.weight
        self._entries, self._near, self._far = (near, far), near.values, None if far is None else far.values
        self._moments = near.moments_towards(far, pages.weight)
        self._room = torch.empty(near.values[0].shape, dtype=torch.float32, device=pages.near.device)

    @cached_property
    def _near_scales(self) -> Callable[[int], Tensor] | None:
        near, far = self._entries
        return near.weighted_scales(1.0 if far is None else 1.0 - self._weight, at_once=self._wait is None)

    @cached_property
    def _far_scales(self) -> Callable[[int], Tensor] | None:
        far = self._entries[1]
        return None if far is None else far.weighted_scales(self._weight, at_once=self._wait is None)

    def read(self, block: int, out: Tensor) -> None:
        """As `Reader.read`; at a keyframe float32 pages are read without loss into float32. Every pass covers all heads
        and both K and V: chunks by head that fit a core's cache took 1.3 to 3.6 times as long, and one product of int8
        with float32, converted by PyTorch, 9 times.
        """
        if self._wait is not None:
            self._wait(block)
        scales = None if self._near_scales is None else self._near_scales(block)
        if scales is not None and isinstance(self._kernels, Kernels) and can_read(out):
            self._kernels.read(self._near[block], scales, *self._further(block), out)
            return
        wide = out if out.dtype == torch.float32 else torch.empty_like(self._room)
        if scales is None:
            self._read_floats(block, wide)
        else:
            self._read_int8(block, wide, scales)
        if wide is not out:
            out.copy_(wide)

    def read_over(self, block: int, keys_values: KeysValues, fresh: Tensor, rows: Tensor) -> None:
        """As `Reader.read_over`."""
        near, far = self._entries
        if near.scales is not None and isinstance(keys_values, PlacedKeysValues):
            if self._wait is not None:
                self._wait(block)
            last = None if far is None else far.keyframe(block, self._weight)
            keys_values.place(near.keyframe(block, 1.0 if far is None else 1.0 - self._weight), last, fresh, rows)
            return
        self.read(block, keys_values.image)
        keys_values.put(fresh, rows)

    def moments(self, block: int) -> Tensor:
        if self._wait is not None:
            self._wait(block)
        return self._moments(block)

    def _further(self, block: int) -> tuple[Tensor | None, Tensor | None]:
        """A block's values and scales at the far keyframe, if there is one."""
        if self._far is None or self._far_scales is None:
            return None, None
        return self._far[block], self._far_scales(block)

    def _read_int8(self, block: int, wide: Tensor, near_scales: Tensor) -> None:
        near, (far, far_scales) = self._near[block], self._further(block)
        if far is None or far_scales is None:
            wide.copy_(near).mul_(near_scales)
        elif self._kernels is not None:
            self._kernels.interpolate(near, near_scales, far, far_scales, wide)
        else:
            wide.copy_(near).mul_(near_scales)
            wide.addcmul_(self._room.copy_(far), far_scales)

    def _read_floats(self, block: int, wide: Tensor) -> None:
        wide.copy_(self._near[block])
        if self._far is not None:
            wide.lerp_(self._room.copy_(self._far[block]), self._weight)


def quantise(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Symmetric int8 quantisation per row. x: [..., width]; values: int8 [..., width]; scales: float32 [..., 1], amax /
    127. Writes values and scales.

    x is within half a scale of scales * values. A row of zeros, or whose scale underflows, gets scale 0.
    """
    x = x.float()
    torch.div(x.abs().amax(-1, keepdim=True), INT8_MAX, out=scales)
    values.copy_((x / scales).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-INT8_MAX, INT8_MAX))


class PageEntry:
    """Views of an entry, uint8 [entry bytes] aligned to 64 bytes, of a picture of `num_tokens` image tokens.

    values: of each block, [2 (K, V), heads, rows, head dim] in the pages' dtype. scales: float32 [blocks, 2, heads,
    rows, 1], int8 pages only. moments: [blocks, numbers, image tokens] of a float dtype.
    """

    def __init__(self, entry: Tensor, layout: PageLayout, num_tokens: int, quantise: Quantise = quantise) -> None:
        self._quantise = quantise
        blocks = entry.view(layout.num_blocks, layout.block_bytes(num_tokens))
        shape = (layout.num_blocks, 2, layout.num_heads, layout.num_rows(num_tokens))
        end = layout.value_bytes(num_tokens)
        self.values: Sequence[Tensor] = (
            blocks[:, :end].view(_DTYPES[layout.dtype]).view(*shape, layout.head_dim).unbind()
        )
        self.scales: Tensor | None = None
        if layout.dtype == "int8":
            scales = blocks[:, end : end + layout.scale_bytes(num_tokens)]
            self.scales = scales.view(torch.float32).view(*shape, 1)
        end += layout.scale_bytes(num_tokens)
        moments = blocks[:, end : end + layout.moment_bytes(num_tokens)].view(_MOMENT_DTYPES[layout.dtype])
        self.moments = moments.view(layout.num_blocks, layout.num_moments, num_tokens)

    def of_heads(self, heads: tuple[int, int] | None) -> Self:
        """The same entry, to be read for these heads only; None: all."""
        if heads is None:
            return self
        part, chosen = copy(self), slice(*heads)
        part.values = [values[:, chosen] for values in self.values]
        part.scales = None if self.scales is None else self.scales[:, :, chosen]
        return part

    def keyframe(self, block: int, weight: float) -> Keyframe:
        """A block of int8 pages, and its weight beside another entry."""
        assert self.scales is not None
        return Keyframe(self.values[block], self.scales[block], weight)

    def weighted_scales(self, weight: float, *, at_once: bool) -> Callable[[int], Tensor] | None:
        """A function: block -> weight * its scales. at_once: multiply all now, else each block when it is asked for."""
        scales = self.scales
        if scales is None:
            return None
        return (scales * weight).unbind().__getitem__ if at_once else lambda block: scales[block] * weight

    def moments_towards(self, far: PageEntry | None, weight: float) -> Callable[[int], Tensor]:
        """A function: block -> (1 - weight) * its moments + weight * those of `far`."""
        near = self.moments
        if far is None:
            return lambda block: near[block].float()
        further = far.moments
        return lambda block: torch.lerp(near[block].float(), further[block].float(), weight)

    def write(self, block: int, key_value: Tensor, moments: Tensor | None = None) -> None:
        """Write a block's keys and values, [2, heads, tokens, head dim] in any float dtype and memory order, and its
        moments, [numbers, image tokens], or zeros if it has none."""
        if moments is None:
            self.moments[block].zero_()
        else:
            largest = torch.finfo(self.moments.dtype).max  # an infinite moment would spoil the whole picture
            self.moments[block].copy_(moments.clamp(-largest, largest))
        if self.scales is None:
            self.values[block].copy_(key_value)
        else:
            self._quantise(key_value, self.values[block], self.scales[block])

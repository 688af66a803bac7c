"""Pages as tensors: writing a block's keys and values into an entry, and reading them back at any noise level.

`core.page_scheme` says how an entry lies in memory. Everything here works on views of those bytes; nothing is copied
but what a block's attention needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.page_scheme import PageDtype, PageLayout

INT8_MAX = 127

_DTYPES: dict[PageDtype, torch.dtype] = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Pages:
    """A template's pages at one noise level: (1 - weight) * near + weight * far.

    near, far: entries, uint8 [entry bytes]; far is None exactly at a keyframe. wait: returns once a block may be read,
    for entries that are still being loaded.
    """

    layout: PageLayout
    num_tokens: int
    near: Tensor
    far: Tensor | None
    weight: float
    wait: Callable[[int], None] | None = None

    def read(self, block: int, out: Tensor) -> None:
        """Keys and values of a block into `out`, float32 or bfloat16 [2, heads, tokens, head dim].

        Exact at a keyframe, and float32 pages in float32 lose nothing.
        """
        if self.wait is not None:
            self.wait(block)
        near = page_of(self.near, self.layout, block, self.num_tokens)
        if self.far is None:
            near.read(out)
        else:
            near.read_between(page_of(self.far, self.layout, block, self.num_tokens), self.weight, out)


@dataclass(frozen=True, slots=True)
class Page:
    """Views of one block's bytes. values: [2 (K, V), heads, tokens, head dim] in the page's dtype; scales: float32
    [2, heads, tokens, 1], int8 pages only."""

    values: Tensor
    scales: Tensor | None

    def write(self, key_value: Tensor) -> None:
        """Keep keys and values, [2, heads, tokens, head dim] in any float dtype and memory order."""
        if self.scales is None:
            self.values.copy_(key_value)
        else:
            quantise(key_value, self.values, self.scales)

    def read(self, out: Tensor) -> None:
        """This page alone into `out`, [2, heads, tokens, head dim]."""
        if self.scales is None:
            out.copy_(self.values)
        elif out.dtype == torch.float32:
            out.copy_(self.values).mul_(self.scales)
        else:
            out.copy_(self.values.float().mul_(self.scales))

    def read_between(self, far: Page, weight: float, out: Tensor) -> None:
        """(1 - weight) * self + weight * far into `out`, computed in float32.

        Every pass runs over all heads and both K and V at once: chunks by head that stay in the cache took 1.3 to 3.6
        times as long, and a product of int8 with float32 in one call, converted by PyTorch, 9 times. The weights are
        folded into the scales, which are a head dim's part of the values.
        """
        mixed = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        if self.scales is None or far.scales is None:
            torch.lerp(self.values.float(), far.values.float(), weight, out=mixed)
        else:
            mixed.copy_(self.values).mul_(self.scales * (1.0 - weight))
            mixed.addcmul_(far.values.float(), far.scales * weight)
        if mixed is not out:
            out.copy_(mixed)


def page_of(entry: Tensor, layout: PageLayout, block: int, num_tokens: int) -> Page:
    """One block's page within an entry, uint8 [entry bytes], which starts at a multiple of 64 bytes."""
    start = block * layout.block_bytes(num_tokens)
    end_of_values = start + layout.value_bytes(num_tokens)
    shape = (2, layout.num_heads, num_tokens, layout.head_dim)
    values = entry[start:end_of_values].view(_DTYPES[layout.dtype]).view(shape)
    if layout.dtype != "int8":
        return Page(values, None)
    scales = entry[end_of_values : end_of_values + layout.scale_bytes(num_tokens)].view(torch.float32)
    return Page(values, scales.view(*shape[:3], 1))


def quantise(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Symmetric int8 per row. x: [..., width]; values: int8 [..., width]; scales: float32 [..., 1], amax / 127.

    x is within half a scale of scales * values. A row of zeros gets scale 0, and so does one whose scale is no float32.
    """
    x = x.float()
    torch.div(x.abs().amax(-1, keepdim=True), INT8_MAX, out=scales)
    values.copy_((x / scales).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-INT8_MAX, INT8_MAX))

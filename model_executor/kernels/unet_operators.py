"""A UNet's layers on a GPU, all but products, convolutions and attention, as the Triton kernels of `unet_kernels.py`.

Maps are here [images, rows, columns, channels], contiguous, as convolutions of channels_last weights read and write
them: `pixels_last` and `channels_first` turn a map of PyTorch's into one and back without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.page_scheme import PageDtype, PageLayout
from model_executor.kernels.gpu_pages import page_table
from model_executor.kernels.gpu_sizes import power_of_two
from model_executor.page_cache.pages import Pages

Box = tuple[int, int, int, int]
"""left, top, right, bottom; right and bottom are exclusive."""

TILE = 4096
"""Numbers of a map that a program processes at a time."""

CHUNKS = 32
"""Largest number of parts of a map whose moments are computed apart, and then combined; a power of two."""

COLUMNS = 64
"""Channels, with gaps, that a program of the group norm processes side by side: enough to read whole cache lines."""

TOKENS = 256
"""Tokens that a program of `places`, or of pooled moments, processes at a time."""

CLOSE = 1e-3
"""Largest difference to PyTorch's layers for the kernels to count as working, of numbers around 1 in float32."""


def pixels_last(x: Tensor) -> Tensor:
    """A map of PyTorch's, [images, channels, rows, columns], as one of this module's."""
    return x.permute(0, 2, 3, 1).contiguous()


def channels_first(x: Tensor) -> Tensor:
    """A map of this module's, as one of PyTorch's in the memory format channels_last."""
    return x.permute(0, 3, 1, 2)


class OpenPages:
    """A template's pages, as the kernels read them. Raises ValueError for pages of a part of the heads."""

    def __init__(self, pages: Pages) -> None:
        if pages.heads is not None:
            raise ValueError("a UNet's pages are read whole")
        layout, number = pages.layout, pages.num_tokens
        self._pages = pages  # whose memory must last as long as the pass
        self.layout, self.num_tokens, self._wait = layout, number, pages.wait
        self.block_bytes, self.value_bytes = layout.block_bytes(number), layout.value_bytes(number)
        self.moment_byte = self.value_bytes + layout.scale_bytes(number)
        self.numbers = 2 * layout.num_heads * layout.num_rows(number) * layout.head_dim
        self.table = page_table([pages], pages.near.device)

    def wait(self, first: int, number: int) -> None:
        """Wait until these pages may be read."""
        if self._wait is not None:
            for page in range(first, first + number):
                self._wait(page)


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of groups of channels of maps, in chunks, as the kernel `group_moments` has written them."""

    partial: Tensor  # float32 [images, groups, chunks, 2]: mean, and sum of squared deviations
    num_pixels: int  # of a map, or of its box
    chunk_pixels: int
    outside: Tensor | None = None  # float32 [2, groups], mean and variance of what lies outside the box
    share: float = 1.0  # of a map that the box covers


@dataclass(frozen=True, slots=True)
class Outside:
    """Where the moments of a map outside a box are: those of a page, at the tokens of a picture outside that box."""

    pages: OpenPages
    page: int
    box: Box  # in tokens
    grid: tuple[int, int]  # the picture's tokens, as (rows, columns)


@dataclass(frozen=True, slots=True)
class AddedToMap:
    """What is added to a map before its group norm."""

    bias: Tensor | None = None  # [channels]
    time: Tensor | None = None  # [images, channels], rows of which may lie apart


NOTHING = AddedToMap()


@dataclass(frozen=True, slots=True)
class Fresh:
    """What a block has computed of its output map: (own + change + bias) * scale."""

    change: Tensor  # [images, pixels computed, channels]
    own: Tensor | None = None  # of the shape of `change`, or with `is_own_whole` of the whole output; None for none
    is_own_whole: bool = False
    bias: Tensor | None = None  # [channels]
    scale: float = 1.0


class UnetOperators:
    """Triton's kernels of a UNet's layers. Weights of norms are of the dtype of their inputs."""

    def __init__(self, kernels: ModuleType) -> None:
        """kernels: the module `unet_kernels`."""
        self._kernels = kernels

    # ------------------------------------------------------------------------------------------------------- tokens

    def places(self, active: Tensor, num_tokens: int) -> Tensor:
        """For each token its first index in `active`, int64, ascending, whose last one may be repeated; -1 where it is
        not among them: int32 [tokens]."""
        places = torch.empty(num_tokens, dtype=torch.int32, device=active.device)
        rounds = len(active).bit_length()
        self._kernels.find_places[-(-num_tokens // TOKENS),](
            active, places, len(active), rounds, num_tokens, TOKENS=TOKENS
        )
        return places

    def norm_and_gather(
        self, norm: nn.LayerNorm, x: Tensor, active: Tensor, side: int, grid_columns: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Layer norm of x, [images, tokens, width]; and of the active tokens, [images, active * side * side, width], x
        and its norm. active: tokens of a picture with grid_columns tokens per row, each of which is side * side tokens
        of x."""
        images, tokens, width = x.shape
        x, number = x.contiguous(), len(active) * side * side
        normed, (some, some_normed) = torch.empty_like(x), x.new_empty(2, images, number, width)
        together, block = _rows_of(width)
        self._kernels.norm_and_gather[-(-(tokens + number) // together), images](
            *(x, norm.weight, norm.bias, active, normed, some, some_normed),
            *(tokens, number, grid_columns, width, norm.eps),
            SIDE=side,
            ROWS=together,
            BLOCK=block,
        )
        return normed, some, some_normed

    def add_and_norm_(self, norm: nn.LayerNorm, x: Tensor, y: Tensor) -> Tensor:
        """x += y, then layer norm of x. Both are contiguous, [..., width]."""
        normed, y, width = torch.empty_like(x), y.contiguous(), x.shape[-1]
        (together, block), number = _rows_of(width), x.numel() // width
        self._kernels.add_and_norm[-(-number // together),](
            x, y, norm.weight, norm.bias, normed, number, width, norm.eps, ROWS=together, BLOCK=block
        )
        return normed

    def geglu(self, x: Tensor) -> Tensor:
        """The first half of x, [..., 2 * width], times GELU of its second half."""
        x, width = x.contiguous(), x.shape[-1] // 2
        out, block = x.new_empty(*x.shape[:-1], width), min(1024, power_of_two(width))
        together, number = TILE // 4 // block, out.numel() // width
        self._kernels.geglu[-(-number // together), -(-width // block)](
            x, out, number, width, ROWS=together, BLOCK=block
        )
        return out

    # --------------------------------------------------------------------------------------------------- group norm

    def moments(
        self,
        x: Tensor,
        num_groups: int,
        box: Box | None = None,
        added: AddedToMap = NOTHING,
        outside: Outside | None = None,
        share: float = 1.0,
    ) -> Moments:
        """Moments of each map of x, or of a box of it, in pixels. outside, share: where those of the rest are, and the
        share of the rest and box together that the box covers."""
        images, rows, columns, channels = x.shape
        left, top, right, bottom = box or (0, 0, columns, rows)
        tiling, pixels = Tiling.of(channels, num_groups), (right - left) * (bottom - top)
        tiles = -(-pixels // (tiling.pixels * CHUNKS))
        chunks = -(-pixels // (tiling.pixels * tiles))
        partial = torch.empty(images, num_groups, chunks, 2, dtype=torch.float32, device=x.device)
        pooled, of_page, table = _page_arguments(outside, num_groups, partial)
        self._kernels.group_moments[chunks + (outside is not None), tiling.blocks, images](
            *(x, *_added(added, x), partial, pooled, *table, num_groups, _step(added.time)),
            *(rows * columns, columns, left, top, right - left, pixels, tiles, chunks, *of_page),
            PIXELS=tiling.pixels,
            GROUPS=tiling.groups,
            SIZE=tiling.size,
            WIDTH=tiling.width,
            HAS_BIAS=added.bias is not None,
            HAS_TIME=added.time is not None,
            HAS_OUTSIDE=outside is not None,
            TOKENS=TOKENS,
            MOMENT=_type_of("float32" if outside is None else outside.pages.layout.dtype, is_moment=True),
        )
        return Moments(partial, pixels, tiles * tiling.pixels, None if outside is None else pooled, share)

    def normalised(
        self,
        norm: nn.GroupNorm,
        x: Tensor,
        moments: Moments,
        added: AddedToMap = NOTHING,
        *,
        silu: bool,
        valid: Box | None = None,
    ) -> Tensor:
        """Group norm of x with these moments, and SiLU. valid: the box of x, in pixels, beyond which the result is
        zero; None: all of x."""
        return self._normalised(norm, x, moments, added, silu, None, valid, 0)[0]

    def normalised_and_cut(
        self, norm: nn.GroupNorm, x: Tensor, moments: Moments, box: Box, margin: int
    ) -> tuple[Tensor, Tensor]:
        """Group norm, and SiLU, of a box of x and `margin` pixels around it, zero beyond x; and the box itself."""
        left, top, right, bottom = box
        cut = left - margin, top - margin, right + margin, bottom + margin
        return self._normalised(norm, x, moments, NOTHING, True, cut, None, margin)

    def _normalised(
        self,
        norm: nn.GroupNorm,
        x: Tensor,
        moments: Moments,
        added: AddedToMap,
        silu: bool,
        cut: Box | None,
        valid: Box | None,
        margin: int,
    ) -> tuple[Tensor, Tensor]:
        images, rows, columns, channels = x.shape
        whole = (0, 0, columns, rows)
        left, top, right, bottom = cut or whole
        bounds = whole if valid is None else _common(whole, valid)
        size, tiling = (bottom - top, right - left), Tiling.of(channels, norm.num_groups)
        out = x.new_empty(images, *size, channels)
        raw = x.new_empty(images, size[0] - 2 * margin, size[1] - 2 * margin, channels) if margin else out
        chunks = moments.partial.shape[2]
        outside = moments.partial if moments.outside is None else moments.outside
        number = size[0] * size[1]
        self._kernels.normalise_groups[-(-number // tiling.pixels), tiling.blocks, images](
            *(x, *_added(added, x), moments.partial, outside, norm.weight, norm.bias, out, raw),
            *(norm.num_groups, norm.eps, _step(added.time), rows * columns, columns, left, top),
            *(chunks, moments.chunk_pixels, moments.num_pixels, moments.share, size[1], number, *bounds),
            PIXELS=tiling.pixels,
            GROUPS=tiling.groups,
            SIZE=tiling.size,
            WIDTH=tiling.width,
            CHUNKS=CHUNKS,  # not this map's number: a mask of another size would compile the kernel again
            HAS_BIAS=added.bias is not None,
            HAS_TIME=added.time is not None,
            HAS_OUTSIDE=moments.outside is not None,
            SILU=silu,
            RAW=margin,
        )
        return out, raw

    # --------------------------------------------------------------------------------------------------------- maps

    def add(self, x: Tensor, y: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """(x + y + bias) * scale. x, y: [..., channels], contiguous."""
        out, channels = torch.empty_like(x), x.shape[-1]
        block, number = min(COLUMNS, power_of_two(channels)), x.numel() // channels
        together = TILE // block
        self._kernels.add_biased[-(-number // together), -(-channels // block)](
            *(x, y, x if bias is None else bias, out, number, channels, scale),
            HAS_BIAS=bias is not None,
            PIXELS=together,
            BLOCK=block,
        )
        return out

    def twice_as_large(self, x: Tensor, size: tuple[int, int], cut: Box) -> Tensor:
        """A box of x enlarged to `size`, (rows, columns), by repetition of pixels; zero beyond it."""
        images, rows, columns, channels = x.shape
        left, top, right, bottom = cut
        out = x.new_empty(images, bottom - top, right - left, channels)
        number, block = (bottom - top) * (right - left), min(COLUMNS, power_of_two(channels))
        pixels = TILE // block
        self._kernels.cut_twice_as_large[-(-number // pixels), -(-channels // block), images](
            *(x, out, rows, columns, channels, left, top, right - left, number, *size), PIXELS=pixels, BLOCK=block
        )
        return out

    def fill(
        self,
        pages: OpenPages,
        first_page: int,
        shape: tuple[int, int, int],
        fresh: Fresh,
        side: int,
        grid_columns: int,
        where: Tensor | Box,
    ) -> Tensor:
        """A block's whole output, [images, pixels, channels] = `shape`: what was computed, and beside it the pages from
        first_page on. side: pixels per token, along a side. where: what was computed: `places` of the active tokens, or
        a box in pixels. Waits for the pages."""
        images, pixels, channels = shape
        layout, (change, own) = pages.layout, (fresh.change.contiguous(), fresh.own)
        pages.wait(first_page, pixels * channels // pages.numbers)
        out, size = change.new_empty(shape), layout.head_dim
        block = power_of_two(size)
        together = max(1, TILE // block)
        places, box = (where, (0, 0, 0, 0)) if isinstance(where, Tensor) else (pages.table.weights, where)
        has_scales = layout.dtype == "int8"
        self._kernels.fill[-(-pixels // together), channels // size](
            *(pages.table.addresses, pages.table.weights, places, change if own is None else own, change),
            *(change if fresh.bias is None else fresh.bias, out, fresh.scale),
            *(first_page * pages.block_bytes, pages.block_bytes, pages.value_bytes, pages.numbers),
            *(pixels, channels, images, change.shape[1], grid_columns, *box),
            VALUE=_type_of(layout.dtype),
            HAS_SCALES=has_scales,
            ALIGNED=size * _ITEM_BYTES[layout.dtype] % 16 == 0 and pages.block_bytes % 16 == 0,
            BOX=not isinstance(where, Tensor),
            SIDE=side,
            OWN=0 if own is None else 2 if fresh.is_own_whole else 1,
            HAS_BIAS=fresh.bias is not None,
            SIZE=size,
            ROWS=together,
            BLOCK=block,
        )
        return out


_ITEM_BYTES: dict[PageDtype, int] = {"int8": 1, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the channels of a group norm are shared out: a program has `groups` of `size` channels, in columns of
    `width`, at some pixels; `blocks` of programs have all groups."""

    size: int
    width: int
    groups: int
    blocks: int
    pixels: int

    @classmethod
    @cache
    def of(cls, channels: int, num_groups: int) -> Tiling:
        size = channels // num_groups
        width = power_of_two(size)
        groups = max(1, min(power_of_two(num_groups), COLUMNS // width))
        return cls(size, width, groups, -(-num_groups // groups), max(16, TILE // (groups * width)))


def _type_of(dtype: PageDtype, *, is_moment: bool = False) -> Any:
    """Triton's type of pages' values, or of their moments."""
    from model_executor.kernels.unet_kernels import MOMENTS, VALUES  # Triton is not everywhere

    return MOMENTS[dtype] if is_moment else VALUES[dtype]


def _rows_of(width: int) -> tuple[int, int]:
    """Rows that a program of a layer norm processes at a time, and the power of two >= their width."""
    block = power_of_two(width)
    return max(1, TILE // 2 // block), block


def _added(added: AddedToMap, x: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments of the kernels; x stands for what there is none of."""
    return x if added.bias is None else added.bias, x if added.time is None else added.time


def _step(time: Tensor | None) -> int:
    return 0 if time is None else time.stride(0)


def _page_arguments(
    outside: Outside | None, num_groups: int, like: Tensor
) -> tuple[Tensor, Sequence[int], tuple[Tensor, Tensor]]:
    """What `group_moments` takes for the moments of a page: the output, the page's place and the picture, the table.
    Waits for the page. like: stands for what there is none of."""
    if outside is None:
        return like, [0] * 7, (like, like)
    pages, table = outside.pages, outside.pages.table
    pages.wait(outside.page, 1)
    first = outside.page * pages.block_bytes + pages.moment_byte
    picture = [first, pages.num_tokens, outside.grid[1], *outside.box]
    return like.new_empty(2, num_groups), picture, (table.addresses, table.weights)


def _common(one: Box, other: Box) -> Box:
    return max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3])


@torch.inference_mode()
def try_out(operators: UnetOperators, device: torch.device) -> None:
    """Run every kernel on a few numbers. Raises RuntimeError if results differ from PyTorch's."""
    pairs = [*_tokens(operators, device), *_norms(operators, device), *_pages(operators, device)]
    if not all(torch.allclose(ours, theirs, rtol=0.0, atol=CLOSE) for ours, theirs in pairs):
        raise RuntimeError(f"its kernels compute wrongly on {device}")


def _tokens(operators: UnetOperators, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(ours, PyTorch's) of 4 tokens, of which one of 2 * 2 pixels is active."""
    x, norm = torch.linspace(-1.0, 1.0, 128, device=device).view(1, 4, 32), nn.LayerNorm(32, device=device)
    normed, some, some_normed = operators.norm_and_gather(
        norm, x, torch.zeros_like(x[0, 0, :1], dtype=torch.int64), 2, 1
    )
    change, gates = x.flip(0, 1), x.chunk(2, dim=2)
    added = x.clone()
    places = operators.places(torch.tensor([1, 1], device=device), 3).float()
    return [
        (normed, norm(x)),
        (some, x),
        (some_normed, norm(x)),
        (operators.add_and_norm_(norm, added, change), norm(x + change)),
        (added, x + change),
        (operators.geglu(x), gates[0] * F.gelu(gates[1])),
        (places, torch.tensor([-1.0, 0.0, -1.0], device=device)),
    ]


def _norms(operators: UnetOperators, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(ours, PyTorch's) of a map of 2 * 2 pixels and 3 groups of 8 channels."""
    x, norm = torch.linspace(-1.0, 1.0, 96, device=device).view(1, 2, 2, 24), nn.GroupNorm(3, 24, device=device)
    whole = F.silu(norm(channels_first(x))).permute(0, 2, 3, 1)
    normed, raw = operators.normalised_and_cut(norm, x, operators.moments(x, 3), (0, 0, 2, 2), 1)
    return [
        (normed, F.pad(whole, (0, 0, 1, 1, 1, 1))),
        (raw, x),
        (operators.add(x, x, x[0, 0, 0], 0.5), x + x[0, 0, 0] / 2),
        (operators.twice_as_large(x, (4, 4), (0, 0, 2, 2)), x[:, :1, :1].expand(1, 2, 2, 24)),
    ]


def _pages(operators: UnetOperators, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(ours, PyTorch's) of a page of 4 tokens with 16 channels, of which the last is computed."""
    layout = PageLayout(num_blocks=1, num_heads=1, head_dim=8, dtype="float32", num_moments=2)
    entry = torch.linspace(-1.0, 1.0, layout.entry_bytes(4) // 4, device=device)
    pages, values = OpenPages(Pages(layout, 4, entry.view(torch.uint8), None, 0.0)), entry[:64].view(1, 4, 16)
    change = torch.zeros(1, 1, 16, device=device)
    x = torch.linspace(-1.0, 1.0, 16, device=device).view(1, 2, 2, 4)
    outside = Outside(pages, 0, (0, 0, 1, 2), (2, 2))
    moments = operators.moments(x, 1, (0, 0, 1, 2), outside=outside, share=0.5).outside
    means, deviations = entry[64:72].view(2, 4)[:, 1::2]
    variance = (deviations.square() + (means - means.mean()).square()).mean()
    assert moments is not None
    return [
        (
            operators.fill(pages, 0, (1, 4, 16), Fresh(change), 1, 2, (1, 1, 2, 2)),
            torch.cat([values[:, :3], change], dim=1),
        ),
        (moments.flatten(), torch.stack([means.mean(), variance])),
    ]

"""Compiled C kernels for one CPU core (`cpu_kernels.c` and what it includes): page reading and, with AVX-512, the
denoiser's products and attention, its norms in bfloat16, and the VAE's group norms. bfloat16 is multiplied by AMX where
there is AMX.

In a step of few tokens, calling oneDNN takes more time than some of its products, and so does waiting for weights from
memory. And oneDNN's attention keeps scores in memory. The kernels are compiled with the machine's C compiler when they
are first needed, in about three seconds, and kept for later processes (`compiled_library.py`).
Without a compiler, or with more than one thread, PyTorch computes instead; results differ by rounding.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from core.cache_folder import user_cache_folder
from model_executor.cpu import cpu_features
from model_executor.kernels.compiled_library import CompileError, compiled_library
from model_executor.kernels.huge_pages import HugePages
from model_executor.kernels.ragged import Span

logger = logging.getLogger("stencil.worker")

PANEL = 64
"""Outputs of a layer and head dims must be multiples of this."""

LANES = 16
QUERIES = 64
MIN_KEYS = 16
TILE_KEYS = 192
HALF_DEPTH = 1280

TILE_DEPTH = 32
SQUARE = 32
BLOCK_DEPTH = 4096
"""Inputs in a tile's row; rows and outputs that AMX's tiles compute at a time; inputs at a time. See
cpu_amx_linear.c."""

Order = Literal["oneDNN", "panels", "tiles"]
"""Of packed weights: the one that oneDNN reads, or our kernels, in bfloat16 with AMX or otherwise."""

BlockKind = Literal["double", "single"]
"""A transformer block's kind: double if text and image tokens have layers of their own, single if they share all. See
cpu_amx_blocks.c."""

KEPT_TABLES = 1024
"""Spans of rows, as C reads them, that are kept: a step asks for a few dozen times for a few of them."""

_FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=fast", "-shared", "-fPIC")


class _Addition(Structure):
    _fields_ = (
        ("low", c_void_p),
        ("low_step", c_long),
        ("up", c_void_p),
        ("columns", c_void_p),
        ("depth", c_long),
    )


class _Keys(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("computed_keys", "computed_values")),
        *((name, c_long) for name in ("row_step", "head_step")),
        *(("rows", c_void_p), ("num_rows", c_long)),
        *((name, c_void_p) for name in ("near", "far", "near_scale", "far_scale")),
        *((name, c_long) for name in ("kind_step", "page_head_step", "scale_kind_step", "scale_head_step")),
        *(("near_weight", c_float), ("far_weight", c_float), ("first", c_int)),
    )


class _Piece(Structure):
    _fields_ = (("start", c_long), ("stop", c_long), ("first", c_long), ("count", c_long))


_SIGNATURES: dict[str, list[Any]] = {
    "stencil_linear": [
        *(c_void_p, c_long, c_int, c_void_p, c_void_p, c_int, c_int),
        *(POINTER(_Piece), c_int, POINTER(_Addition), c_void_p, c_long),
    ],
    "stencil_narrow_linear": [c_void_p, c_long, c_int, c_int, c_void_p, c_int, c_void_p, c_void_p],
    "stencil_attend": [
        *(c_void_p, c_long, c_int, c_int, c_int, c_float),
        *(c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_long),
    ],
    "stencil_normalise_and_rotate": [c_void_p, c_long, c_int, c_int, c_int, c_float, c_void_p, c_void_p],
    "stencil_interpolate": [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p, c_long],
    "stencil_quantise": [
        *(c_void_p, c_long, c_long, c_long, c_int, c_int, c_int, c_int, c_int),
        *(c_void_p, c_long, c_void_p, c_long),
    ],
    "stencil_tile_sums": [c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p],
    "stencil_moments": [c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p, c_int, c_void_p],
    "stencil_norm_silu": [c_void_p, c_long, c_int, c_void_p, c_int, c_void_p, c_void_p, c_float, c_void_p],
    "stencil_gelu": [c_void_p, c_long, c_int],
    "stencil_swiglu": [c_void_p, c_long, c_long, c_long, c_int, c_void_p, c_long],
    "stencil_half_linear": [
        *(c_void_p, c_long, c_int, c_void_p, c_void_p, c_int, c_int),
        *(POINTER(_Piece), c_int, POINTER(_Addition), c_void_p, c_void_p, c_long),
    ],
    "stencil_half_narrow_linear": [c_void_p, c_long, c_int, c_int, c_void_p, c_int, c_void_p, c_void_p],
    "stencil_half_attend": [
        *(c_void_p, c_long, c_int, c_int, c_int, c_float),
        *(c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_long),
    ],
    "stencil_half_normalise_and_rotate": [c_void_p, c_long, c_int, c_int, c_int, c_float, c_void_p, c_void_p],
    "stencil_half_norm": [
        *(c_void_p, c_int, c_float, POINTER(c_long), c_int, c_void_p, c_long, c_void_p, c_long, c_void_p)
    ],
    "stencil_half_add_gated": [c_void_p, c_void_p, c_int, POINTER(c_long), c_int, c_void_p, c_long, c_float],
    "stencil_half_interpolate": [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p, c_long],
}

_TILE_SIGNATURES: dict[str, list[Any]] = {
    "stencil_tile_attend": [
        *(c_void_p, c_long, c_int, c_int, c_int, c_float),
        *(POINTER(_Keys), c_int, c_void_p, c_void_p, c_long),
    ],
    "stencil_tile_linear": [
        *(c_void_p, c_long, c_int, c_void_p, c_void_p, c_int, c_int),
        *(POINTER(_Piece), c_int, POINTER(_Addition), c_void_p, c_void_p, c_void_p, c_long),
    ],
    **{
        f"stencil_{half}_{kind}_block": [c_void_p, c_void_p, c_void_p, c_void_p, c_long]
        for kind in get_args(BlockKind)
        for half in ("begin", "end")
    },
}
"""Of the functions that a library has only on CPUs with AMX."""


class AddedProduct(NamedTuple):
    """What is added to some rows of a product: low [rows, ...] times up, whose panels read different columns of it."""

    low: Tensor
    up: Tensor  # [outputs / PANEL, depth, PANEL]
    columns: Tensor  # int32 [outputs / PANEL], the first column of `low` for each panel; -1: nothing is added to it


class Keyframe(NamedTuple):
    """Keys and values of a block at one keyframe, or at two, which are added up: weight * scales * values."""

    values: Tensor  # int8 [2, heads, tokens, head dim], each head contiguous
    scales: Tensor  # float32 [2, heads, tokens, 1]
    weight: float


class Others(NamedTuple):
    """The keys and values of an image that were not computed, which are on a page, and where the computed ones are."""

    near: Keyframe
    far: Keyframe | None
    rows: Tensor  # int64 [computed rows], the key that each of them is; those before the image are all computed
    first: int  # the key that is the image's first token

    def add_to(self, source: _Keys) -> int:
        """Tell the kernel. Returns the number of keys."""
        source.rows, source.num_rows, source.first = self.rows.data_ptr(), len(self.rows), self.first
        (values, scales, source.near_weight), far = self.near, self.far
        source.near, source.near_scale = values.data_ptr(), scales.data_ptr()
        source.kind_step, source.page_head_step = values.stride()[:2]
        source.scale_kind_step, source.scale_head_step = scales.stride()[:2]
        if far is not None:
            assert far.values.stride() == values.stride()
            assert far.scales.stride() == scales.stride()
            source.far, source.far_scale = far.values.data_ptr(), far.scales.data_ptr()
            source.far_weight = far.weight
        return self.first + values.shape[2]


Piece = tuple[int, int, Sequence[AddedProduct]]
"""(first row, row after the last, what is added to these rows)."""


class PageKernels:
    """Reads pages; needs AVX2. Has the same bits with AVX-512."""

    def __init__(self, library: ctypes.CDLL, digest: str) -> None:
        """digest: SHA-256 of the compiled library, since another compiler may round differently."""
        self.digest = digest
        self._interpolate = _function(library, "stencil_interpolate")

    def interpolate(self, near: Tensor, near_scale: Tensor, far: Tensor, far_scale: Tensor, out: Tensor) -> None:
        """Write near_scale * near + far_scale * far to out. near, far: int8 [2, heads, tokens, head dim]; scales:
        float32 [2, heads, tokens, 1]; out: float32 of the shape of near, with a constant stride between heads, also of
        keys and values."""
        _interpolated(self._interpolate, near, near_scale, far, far_scale, out)


class Kernels(PageKernels):
    """All compiled functions, called with tensors: on the CPU, float32 unless stated otherwise. They need AVX-512.

    A row's bits do not depend on the number of other rows.
    """

    def __init__(self, library: ctypes.CDLL, digest: str) -> None:
        super().__init__(library, digest)
        self._huge_pages = HugePages()
        self.has_tiles = bool(library.stencil_allow_tiles())
        """Whether the CPU has AMX's tiles and the system lets this process use them."""
        if self.has_tiles:
            self.digest += " tiles"  # the library alone would not tell where the system refuses them
        names = [*_SIGNATURES, *(_TILE_SIGNATURES if self.has_tiles else ())]
        of = {name.removeprefix("stencil_"): _function(library, name) for name in names}
        self._half_interpolate = of["half_interpolate"]
        self._linear, self._half_linear, self._tile_linear = of["linear"], of["half_linear"], of.get("tile_linear")
        self._narrow_linear = {torch.float32: of["narrow_linear"], torch.bfloat16: of["half_narrow_linear"]}
        self._attend = {torch.float32: of["attend"], torch.bfloat16: of["half_attend"]}
        if self.has_tiles:
            self._tile_attend = of["tile_attend"]
            library.stencil_tile_room.restype = c_long
            self._tile_room: Callable[[int, int], int] = library.stencil_tile_room
            self.block_halves = {
                kind: (of[f"begin_{kind}_block"], of[f"end_{kind}_block"]) for kind in get_args(BlockKind)
            }
            """What a block does before its attention, and after it; called by `tile_blocks.py`."""
        self._normalise_and_rotate = {
            torch.float32: of["normalise_and_rotate"],
            torch.bfloat16: of["half_normalise_and_rotate"],
        }
        self._norm, self._add_gated = of["half_norm"], of["half_add_gated"]
        self._quantise, self._gelu, self._swiglu = of["quantise"], of["gelu"], of["swiglu"]
        self._tile_sums, self._moments, self._norm_silu = of["tile_sums"], of["moments"], of["norm_silu"]

    def read(self, near: Tensor, near_scale: Tensor, far: Tensor | None, far_scale: Tensor | None, out: Tensor) -> None:
        """As `interpolate`, to bfloat16, see `can_read`; without far, near_scale * near."""
        _interpolated(self._half_interpolate, near, near_scale, far, far_scale, out)

    def order(self, dtype: torch.dtype) -> Order:
        """The order of weights that `linear` reads."""
        return "tiles" if dtype == torch.bfloat16 and self.has_tiles else "panels"

    def pack(self, weight: Tensor) -> Tensor:
        """The weight [out, in] in the order that `linear` reads, in huge pages. Its memory is freed with its data."""
        put = self._huge_pages.put
        packed = pack_tiles(weight, put) if self.order(weight.dtype) == "tiles" else pack(weight, copy=put)
        return packed.data  # a view would keep what it is a view of

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        *,
        gelu: bool,
        pieces: Sequence[Piece] = (),
        out: Tensor | None = None,
    ) -> Tensor:
        """x [rows, in] times weight, as `pack` returns it, plus bias [out]; gelu applies the tanh approximation to the
        result. All in float32 or in bfloat16, see `can_multiply`. pieces: all rows, in order, with what is added to
        each before that; (): nothing. out: [rows, out] with contiguous rows, to write to; None: a new tensor. Raises
        TypeError for several dtypes, of which C would read memory that is not theirs."""
        _check_dtypes(x, weight, bias)
        x = x if x.stride(1) == 1 else x.contiguous()
        (rows, inputs), (outputs,) = x.shape, bias.shape
        out = x.new_empty(rows, outputs) if out is None else out
        table, additions = _tables(pieces) if pieces else _whole(rows)
        operands = x.data_ptr(), x.stride(0), inputs, weight.data_ptr(), bias.data_ptr(), outputs, gelu
        tables, result = (table, len(table), additions), (out.data_ptr(), out.stride(0))
        if x.dtype == torch.float32:
            self._linear(*operands, *tables, *result)
        elif self._tile_linear is not None:
            rooms = _tile_rooms(x, outputs)
            self._tile_linear(
                *operands, *tables, *(None if room is None else room.data_ptr() for room in rooms), *result
            )
        else:
            room = torch.empty(rows if inputs > HALF_DEPTH else 0, PANEL, dtype=torch.float32)
            self._half_linear(*operands, *tables, room.data_ptr(), *result)
        return out

    def narrow_linear(self, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        """x [rows, in] times weight, as `pack` returns it for panels of LANES, each row times its scale, float32
        [rows]: float32 [rows, outputs]. x, weight: both in float32 or in bfloat16. For a few tens of outputs, for which
        `linear` would read x and write the result too often. Raises TypeError as `linear`."""
        _check_dtypes(x, weight)
        x = x if x.stride(1) == 1 else x.contiguous()
        (rows, inputs), outputs = x.shape, len(weight) * LANES
        out, factors = torch.empty(rows, outputs, dtype=torch.float32), None if scale is None else scale.data_ptr()
        sizes = x.stride(0), rows, inputs
        self._narrow_linear[x.dtype](x.data_ptr(), *sizes, weight.data_ptr(), outputs, factors, out.data_ptr())
        return out

    def can_attend(self, query: Tensor, keys: int) -> bool:
        """Whether `attend` supports these, whatever the number of queries. With tiles it supports all in bfloat16."""
        if query.dtype == torch.bfloat16 and self.has_tiles:
            return True
        is_supported = query.dtype in (torch.float32, torch.bfloat16)
        return is_supported and query.shape[2] % PANEL == 0 and keys >= MIN_KEYS

    def attend(self, query: Tensor, key_value: Tensor, out: Tensor) -> None:
        """Attention, see `can_attend`. query: [queries, heads, head dim], each query contiguous; key_value: [2, heads,
        keys, head dim], contiguous. Writes to out, [queries, heads * head dim] with contiguous rows."""
        if query.dtype == torch.bfloat16 and self.has_tiles:
            room = self.attention_room(query.shape[2], key_value.shape[2])
            return self.attend_to_parts(query, key_value.permute(2, 0, 1, 3), None, room, out)
        queries, heads, width = query.shape
        keys = key_value.shape[2]
        if query.dtype == torch.float32:
            room = query.new_empty((width + keys + 1) * QUERIES)
        else:
            room = query.new_empty((keys + 1 + 3 * QUERIES) * width + 4 * (TILE_KEYS + MIN_KEYS) * QUERIES)
        key = key_value.data_ptr()
        value = key + key_value.stride(0) * key_value.element_size()
        sizes = query.stride(0), queries, heads, width, width**-0.5
        operands = query.data_ptr(), *sizes, key, value, keys, room.data_ptr()
        self._attend[query.dtype](*operands, out.data_ptr(), out.stride(0))

    def attention_room(self, head_dim: int, keys: int) -> Tensor:
        """What `attend_to_parts` works in with up to so many keys, uint8 [bytes]."""
        return torch.empty(self._tile_room(head_dim, keys), dtype=torch.uint8)

    def attend_to_parts(
        self, query: Tensor, computed: Tensor, others: Others | None, room: Tensor, out: Tensor
    ) -> None:
        """Attention in bfloat16 with tiles, to keys and values where they are. query, out: as for `attend`. computed:
        [rows, 2, heads, head dim], each head contiguous. others: None if that are all of them, in order. room: see
        `attention_room`."""
        queries, heads, width = query.shape
        values = computed.data_ptr() + computed.stride(1) * computed.element_size()
        source, keys = _Keys(computed.data_ptr(), values, computed.stride(0), computed.stride(2)), len(computed)
        if others is not None:
            keys = others.add_to(source)
        operands = query.data_ptr(), query.stride(0), queries, heads, width, width**-0.5
        self._tile_attend(*operands, source, keys, room.data_ptr(), out.data_ptr(), out.stride(0))

    def norm(
        self, x: Tensor, where: Sequence[Span], eps: float, factor: Tensor, shift: Tensor | None, out: Tensor
    ) -> None:
        """Layer norm of each row of some spans of x, times the span's factor, plus its shift; without shift a
        root-mean-square norm, times factor. x: [rows, width]; out: [rows, width], one span after the other; factor,
        shift: [spans, width] with contiguous rows. In bfloat16, see `can_norm`."""
        shifts = (None, 0) if shift is None else (shift.data_ptr(), shift.stride(0))
        operands = x.data_ptr(), x.shape[1], eps, span_table(tuple(where)), len(where)
        self._norm(*operands, factor.data_ptr(), factor.stride(0), *shifts, out.data_ptr())

    def add_gated_(self, x: Tensor, where: Sequence[Span], y: Tensor, gate: Tensor, norm_eps: float | None) -> None:
        """x += gate * y, or gate * the root-mean-square norm of y, for some spans of x. x: [rows, width]; y: [rows,
        width], contiguous, one span after the other; gate: [spans, width] with contiguous rows. In bfloat16, see
        `can_norm`. norm_eps: of the norm; None: there is none."""
        eps = -1.0 if norm_eps is None else norm_eps
        operands = x.data_ptr(), y.data_ptr(), x.shape[1], span_table(tuple(where)), len(where)
        self._add_gated(*operands, gate.data_ptr(), gate.stride(0), eps)

    def gelu_(self, x: Tensor) -> Tensor:
        """The tanh approximation of GELU in place, see `can_gelu`. 6 million numbers took 0.28 of PyTorch's time."""
        self._gelu(x.data_ptr(), x.numel(), x.dtype == torch.bfloat16)
        return x

    def swiglu(self, x: Tensor, out: Tensor) -> None:
        """Computes what `Operators.swiglu` does, of tensors that `can_swiglu` allows."""
        rows, width = out.shape
        sizes = x.stride(0), rows, width, x.dtype == torch.bfloat16
        self._swiglu(x.data_ptr(), *sizes, out.data_ptr(), out.stride(0))

    def normalise_and_rotate_(self, x: Tensor, rotary: Tensor, eps: float, weight: Tensor) -> None:
        """Root-mean-square norm and rotary embedding in place. x: [tokens, n, heads, head dim], each token contiguous,
        see `can_rotate`; rotary: complex64 [tokens, 1, 1, head dim / 2]; weight: [n, heads, head dim]."""
        tokens, kinds, heads, width = x.shape
        operands = x.data_ptr(), x.stride(0), tokens, kinds * heads, width, eps
        self._normalise_and_rotate[x.dtype](*operands, weight.data_ptr(), rotary.data_ptr())

    def quantise(self, x: Tensor, values: Tensor, scales: Tensor) -> None:
        """As `page_cache.pages.quantise`, for what `can_quantise` allows, with the same bits for finite numbers. A page
        of 256 tokens took a quarter of PyTorch's time."""
        kinds, heads, tokens, width = x.shape
        sizes = *x.stride()[:3], kinds, heads, tokens, width, x.dtype == torch.bfloat16
        self._quantise(x.data_ptr(), *sizes, values.data_ptr(), values.stride(0), scales.data_ptr(), scales.stride(0))

    def tile_sums(self, x: Tensor, tile: tuple[int, int]) -> Tensor:
        """Sums of the values and of their squares over tiles of `tile` (rows, columns) pixels: [2, channels, tile rows,
        tile columns]. x: bfloat16 [1, channels, height, width], channels last, see `can_normalise`."""
        _, channels, rows, columns = x.shape
        sums = torch.empty(2, rows // tile[0], columns // tile[1], channels, dtype=torch.float32)
        self._tile_sums(x.data_ptr(), rows, columns, channels, *tile, sums.data_ptr())
        return sums.permute(0, 3, 1, 2)

    def moments(self, x: Tensor, num_groups: int, weights: Tensor) -> Tensor:
        """Means of the values and of their squares by group of channels, [2, groups]: those of each tile, times its
        weight, in sum. x: as for `tile_sums`; weights: [tile rows, tile columns], contiguous."""
        _, channels, rows, columns = x.shape
        tile = rows // weights.shape[0], columns // weights.shape[1]
        moments = torch.empty(2, num_groups, dtype=torch.float32)
        sizes = rows, columns, channels, *tile
        self._moments(x.data_ptr(), *sizes, weights.data_ptr(), num_groups, moments.data_ptr())
        return moments

    def norm_silu(self, x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Group norm with given moments, [2, groups], contiguous, and SiLU. x: as for `tile_sums`; weight, bias:
        [channels]."""
        _, channels, rows, columns = x.shape
        out = torch.empty_like(x)
        factors = moments.data_ptr(), moments.shape[1], weight.data_ptr(), bias.data_ptr(), eps
        self._norm_silu(x.data_ptr(), rows * columns, channels, *factors, out.data_ptr())
        return out


_BY_CAPABILITY: dict[str, type[PageKernels]] = {"AVX512": Kernels, "AVX2": PageKernels}
"""PyTorch's name of an instruction set -> the kernels that run with it."""


def can_gelu(x: Tensor) -> bool:
    """Whether `Kernels.gelu_` supports these numbers."""
    return x.dtype in (torch.float32, torch.bfloat16) and x.is_contiguous() and x.shape[-1] % LANES == 0


def can_swiglu(x: Tensor) -> bool:
    """Whether `Kernels.swiglu` supports these numbers, [rows, 2 * width] with contiguous rows."""
    return x.dtype in (torch.float32, torch.bfloat16) and x.stride(1) == 1 and x.shape[1] % (2 * LANES) == 0


def pack(weight: Tensor, panel: int = PANEL, copy: Callable[[Tensor], Tensor] = Tensor.contiguous) -> Tensor:
    """The weight [out, in] in the order that the products read: [panels, in, panel] in float32, [panels, in / 2, panel,
    2] in bfloat16, flattened from the third dimension on. The last panel is filled up with zeros. copy: makes a
    contiguous copy."""
    together = 2 if weight.dtype == torch.bfloat16 else 1
    missing = -len(weight) % panel
    whole = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    return copy(whole.view(-1, panel, weight.shape[1] // together, together).transpose(1, 2)).flatten(2)


def pack_tiles(weight: Tensor, copy: Callable[[Tensor], Tensor] = Tensor.contiguous) -> Tensor:
    """The weight [out, in], bfloat16, or int8 to become that, in the order that products with AMX's tiles read: [out /
    SQUARE, in / TILE_DEPTH, 2, TILE_DEPTH / 2, SQUARE / 2, 2]: squares of outputs, steps of inputs, two tiles of pairs
    of inputs by outputs. It is filled up with zeros. copy: makes a contiguous copy.

    A pair is copied as one number, which takes 0.4 of the time.
    """
    outputs, inputs = weight.shape
    missing = -inputs % TILE_DEPTH, -outputs % SQUARE
    whole = F.pad(weight, (0, missing[0], 0, missing[1])) if any(missing) else weight.contiguous()
    whole = whole.clone() if whole.storage_offset() % 2 else whole  # within a file, a pair may begin at any number
    pairs = whole.view(torch.int32 if weight.dtype == torch.bfloat16 else torch.int16)
    tiles = pairs.view(-1, 2, SQUARE // 2, whole.shape[1] // TILE_DEPTH, TILE_DEPTH // 2)
    packed = copy(tiles.permute(0, 3, 1, 4, 2))
    return packed.view(weight.dtype).view(*packed.shape, 2)


def _tile_rooms(x: Tensor, outputs: int) -> tuple[Tensor | None, Tensor | None]:
    """What `stencil_tile_linear` works in: its `last` and `room`, where it needs them."""
    rows, inputs = x.shape
    if not inputs % TILE_DEPTH and inputs <= BLOCK_DEPTH:
        return None, None
    depth, wide = _filled(inputs, TILE_DEPTH), _filled(outputs, SQUARE)
    room = torch.empty(_filled(rows, SQUARE), wide, dtype=torch.float32) if depth > BLOCK_DEPTH else None
    return x.new_empty(_filled(rows, SQUARE), depth), room


def _filled(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


@lru_cache(KEPT_TABLES)
def span_table(where: tuple[Span, ...]) -> Any:
    """The spans as C reads them."""
    return (c_long * (2 * len(where)))(*chain.from_iterable(where))


@lru_cache(KEPT_TABLES)
def _whole(rows: int) -> tuple[Any, Any]:
    """As `_tables`, of rows that nothing is added to."""
    return _tables(((0, rows, ()),))


def _check_dtypes(x: Tensor, *others: Tensor) -> None:
    if any(each.dtype != x.dtype for each in others):
        raise TypeError(f"a product of {', '.join(str(each.dtype) for each in (x, *others))}")


def _tables(pieces: Sequence[Piece]) -> tuple[Any, Any]:
    """The pieces and their additions as `stencil_linear` reads them. Their tensors must outlive the call."""
    table, additions = (_Piece * len(pieces))(), [each for _, _, its in pieces for each in its]
    first = 0
    for row, (start, stop, its) in zip(table, pieces, strict=True):
        row.start, row.stop, row.first, row.count = start, stop, first, len(its)
        first += len(its)
    return table, (_Addition * len(additions))(*map(_addition, additions))


def _addition(added: AddedProduct) -> _Addition:
    low, up, columns = added
    return _Addition(low.data_ptr(), low.stride(0), up.data_ptr(), columns.data_ptr(), up.shape[1])


def can_multiply(dtype: torch.dtype, inputs: int, outputs: int) -> bool:
    """Whether `Kernels.linear` supports a layer of this size."""
    if dtype == torch.bfloat16:
        return inputs % 2 == 0
    return dtype == torch.float32 and outputs % PANEL == 0


def can_read(out: Tensor) -> bool:
    """Whether `Kernels.read` can write to this tensor, [2, heads, tokens, head dim]."""
    _, heads, _, width = out.shape
    is_packed = out.stride()[2:] == (width, 1) and out.stride(0) == heads * out.stride(1)
    return out.dtype == torch.bfloat16 and width % LANES == 0 and is_packed


def can_rotate(x: Tensor) -> bool:
    """Whether `Kernels.normalise_and_rotate_` supports these queries and keys."""
    return x.dtype in (torch.float32, torch.bfloat16) and x.shape[3] % LANES == 0


def can_quantise(x: Tensor) -> bool:
    """Whether `Kernels.quantise` supports these keys and values, [2, heads, tokens, head dim]."""
    return x.dtype in (torch.float32, torch.bfloat16) and x.stride(3) == 1 and x.shape[3] % LANES == 0


def can_norm(x: Tensor) -> bool:
    """Whether `Kernels.norm` and `add_gated_` support rows of this hidden state, [tokens, width]."""
    return x.dtype == torch.bfloat16 and x.shape[1] % LANES == 0 and x.is_contiguous()


def can_normalise(x: Tensor) -> bool:
    """Whether `Kernels.tile_sums`, `moments` and `norm_silu` support this map."""
    is_packed = x.is_contiguous(memory_format=torch.channels_last)
    return x.dtype == torch.bfloat16 and len(x) == 1 and x.shape[1] % LANES == 0 and is_packed


def best_kernels() -> Kernels | None:
    """All kernels if they are the fastest choice, which they are with one thread; else None."""
    kernels = best_page_kernels()
    return kernels if isinstance(kernels, Kernels) else None


def has_tiles() -> bool:
    """Whether our kernels multiply bfloat16 with AMX's tiles here. Products by oneDNN do, too, but in them a row's bits
    depend on the number of rows."""
    kernels = best_kernels()
    return kernels is not None and kernels.has_tiles


def best_page_kernels() -> PageKernels | None:
    """The fastest kernels of this CPU: without AVX-512, those alone that read pages."""
    return _compiled() if torch.get_num_threads() == 1 else None


@cache
def _compiled() -> PageKernels | None:
    """The kernels that run here, loaded once per process. None, with a line in the log, where none do."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    made = _BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability())
    if made is None or compiler is None:
        logger.info("no compiled kernels: they need AVX2, most of them AVX-512, and a C compiler (cc)")
        return None
    try:
        source, folder = Path(__file__).with_suffix(".c"), user_cache_folder(os.environ) / "kernels"
        with compiled_library(source, compiler, _FLAGS, cpu_features(), folder) as library:
            return made(ctypes.CDLL(str(library.path)), library.digest)
    except (OSError, CompileError) as error:
        logger.warning("no compiled kernels: %s", error)
        return None


def _interpolated(
    function: Callable[..., None],
    near: Tensor,
    near_scale: Tensor,
    far: Tensor | None,
    far_scale: Tensor | None,
    out: Tensor,
) -> None:
    """Have a function write to `out`; see `PageKernels.interpolate`."""
    kinds, heads, tokens, width = near.shape
    if not near.is_contiguous():  # a part of the heads
        for part in (slice(kind, kind + 1) for kind in range(kinds)):
            far_part = None if far is None else far[part]
            its_scale = None if far_scale is None else far_scale[part]
            _interpolated(function, near[part], near_scale[part], far_part, its_scale, out[part])
        return
    pages = (None if x is None else x.data_ptr() for x in (near, near_scale, far, far_scale))
    function(*pages, kinds * heads, tokens, width, out.data_ptr(), out.stride(1))


def _function(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    function = getattr(library, name)
    function.argtypes, function.restype = (_SIGNATURES | _TILE_SIGNATURES)[name], None
    call: Callable[..., None] = function
    return call

"""Operators of `--batch-invariant`: on a GPU, a picture's bits depend neither on what shares its steps nor on how many
ranks compute them.

The fastest products and attention choose tiles, and how they divide their sums, by the number of rows and requests, and
so the order of summation differs. What depends on company in a transformer, and what is done about it:

- products and low-rank additions: `product`, of one size of tile for each dtype
- attention: `attend`, whose programs each see one head and queries of one request
- pages of a share of the heads, as ranks have them that compute a step together: read and made by the kernels for all
  heads, through copies
- a norm of PyTorch's over all prompts: `rms_norm`
- keys of several ranks: put into the order of the tokens (`Shard` of `models/transformer/sequence.py`)

The other Triton kernels work row by row, with tiles by the width alone; noise levels and pooled prompts are embedded
one row at a time; text encoders and VAEs, and by this option UNets, compute one item at a time, with deterministic
convolutions: their shapes, from which libraries choose kernels, are the lone request's. One case is left: norms of
heads whose size is no power of two, which PyTorch computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import e, log2
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from core.errors import ConfigError
from model_executor.kernels import invariant_kernels as kernels
from model_executor.kernels.attention import Attention, Sizes
from model_executor.kernels.gpu_attention import Together, attend_each
from model_executor.kernels.gpu_operators import CLOSE, TritonOperators
from model_executor.kernels.gpu_residual import TritonResidual
from model_executor.kernels.gpu_sizes import power_of_two, warps
from model_executor.kernels.gpu_tables import longest, offsets
from model_executor.kernels.linear import is_plain, plain_linear
from model_executor.kernels.ragged import Span
from model_executor.kernels.residual import Addition, Residual
from model_executor.page_cache.pages import PageEntry, Pages, Reader

ALIGNED = 16
"""Triton reads several numbers at once from pointers of a multiple of this many bytes, and from rows that begin at a
multiple of this many numbers, with a kernel compiled for that."""


class Tiles(NamedTuple):
    """Sizes of a product's tiles, and how a program computes one."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


PRODUCT_TILES = {
    torch.bfloat16: Tiles(128, 128, 64, 8, 4),
    torch.float16: Tiles(128, 128, 64, 8, 4),
    torch.float32: Tiles(64, 64, 32, 4, 2),  # without tensor cores, which round inputs to 10 bits
}
GROUP = 8  # rows of tiles whose programs run at the same time

WIDE = 128
"""With head dims above this, `attend` reads half as many keys at a time, for which there is room in shared memory."""


class InvariantOperators(TritonOperators):
    """Triton's operators, whose results for a request do not depend on the others. Raises ConfigError for quantised
    layers."""

    is_invariant = True

    def __init__(self, triton_kernels: ModuleType) -> None:
        super().__init__(triton_kernels, invariant_linear, lambda like, head_dim: attend)

    @property
    def digest(self) -> str:
        return f"{super().digest} batch-invariant"

    def attention(
        self, sizes: Sizes, heads: int, head_dim: int, like: Tensor, beside: Attention | None = None
    ) -> Attention:
        """As `Operators.attention`, with one kernel for norms and rotations, whatever else a batch needs: two kernels
        that sum the same numbers may do so in another order."""
        return Together(sizes, heads, head_dim, like, attend)

    def residual(self, hidden: Tensor) -> Residual:
        """As `Operators.residual`; additions are never made by the kernel of a norm, for the same reason."""
        return SeparateResidual(hidden, self._kernels)

    def rms_norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        return rms_norm(norm, x)

    def open(self, pages: Pages) -> Reader:
        """As `Operators.open`, with the same kernel for a share of the heads."""
        is_share = pages.heads is not None and pages.heads[0] < pages.heads[1]
        return super().open(own_heads(pages) if is_share else pages)

    def _quantise(self, x: Tensor, values: Tensor, scales: Tensor) -> None:
        if values.is_contiguous():
            super()._quantise(x, values, scales)
            return
        made = values.new_empty(values.shape), scales.new_empty(scales.shape)  # of a share of a page's heads
        super()._quantise(x, *made)
        values.copy_(made[0])
        scales.copy_(made[1])


class SeparateResidual(TritonResidual):
    """Launches every addition by itself."""

    def add(self, *additions: Addition) -> None:
        super().add(*additions)
        self._add_waiting()


def try_out(device: torch.device) -> None:
    """Run the kernels on a few numbers, in bfloat16, of which tiles take most memory. Raises RuntimeError if results
    differ from those of PyTorch's operators, and what Triton raises if a kernel does not compile or fit the device."""
    few = torch.linspace(-1.0, 1.0, 768, dtype=torch.bfloat16, device=device).view(6, 128)
    layer = nn.Linear(128, 6, device=device, dtype=few.dtype)
    layer.weight, layer.bias = (
        nn.Parameter(few / 32, requires_grad=False),
        nn.Parameter(few[:, 0].clone(), requires_grad=False),
    )
    heads, where = few.view(3, 2, 128), ((0, 1), (1, 3))
    norm = nn.RMSNorm(128, 1e-6, device=device, dtype=few.dtype).requires_grad_(False)
    pairs = [
        (invariant_linear(layer, few, gelu=True), plain_linear(layer, few, gelu=True)),
        (attend(heads, heads, heads, where, where), attend_each(heads, heads, heads, where, where)),
        (rms_norm(norm, few), norm(few)),
    ]
    if not all(torch.allclose(ours, theirs, rtol=0.0, atol=CLOSE) for ours, theirs in pairs):
        raise RuntimeError(f"its kernels compute wrongly on {device}")


def own_heads(pages: Pages) -> Pages:
    """The same pages, in entries that hold no heads but those that are read."""
    assert pages.heads is not None
    layout = msgspec.structs.replace(pages.layout, num_heads=pages.heads[1] - pages.heads[0])

    def copied(entry: Tensor) -> Tensor:
        small = entry.new_empty(layout.entry_bytes(pages.num_tokens))
        source = PageEntry(entry, pages.layout, pages.num_tokens).of_heads(pages.heads)
        target = PageEntry(small, layout, pages.num_tokens)
        for values, its in zip(target.values, source.values, strict=True):
            values.copy_(its)
        if target.scales is not None and source.scales is not None:
            target.scales.copy_(source.scales)
        target.moments.copy_(source.moments)
        return small

    if pages.wait is not None:
        for block in range(layout.num_blocks):
            pages.wait(block)
    far = None if pages.far is None else copied(pages.far)
    return replace(pages, layout=layout, near=copied(pages.near), far=far, wait=None, heads=None, table=None)


def invariant_linear(layer: nn.Module, x: Tensor, *, gelu: bool = False) -> Tensor:
    """Computes an `nn.Linear`; see `product`. Raises ConfigError for a quantised one."""
    if not is_plain(layer):
        raise ConfigError("--batch-invariant needs layers that are not quantised")
    return product(x, layer.weight, layer.bias, gelu=gelu)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False) -> Tensor:
    """x [rows, in] times weight [out, in], transposed, plus bias [out], with GELU's tanh approximation if asked for:
    [rows, out], of one dtype of PRODUCT_TILES, summed in float32 and rounded once. A row's bits depend on that row
    alone."""
    (rows, depth), columns, tiles = x.shape, len(weight), PRODUCT_TILES[x.dtype]
    out = x.new_empty(rows, columns)
    if not rows:
        return out
    x, weight = _rows(x), _rows(weight)
    grid = min(-(-rows // tiles.rows) * -(-columns // tiles.columns), _processors(x.device))
    kernels.product[grid,](
        *(x, weight, out if bias is None else bias.contiguous(), out),
        *(rows, columns, depth, x.stride(0), weight.stride(0)),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        GROUP=GROUP,
        IS_WHOLE=depth % tiles.depth == 0,
        HAS_BIAS=bias is not None,
        HAS_GELU=gelu,
        PRECISION=precision(x.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def _rows(x: Tensor) -> Tensor:
    """x, [rows, width], or a copy if its rows do not begin where those of a copy would: the kernel would be compiled
    for them again."""
    width = x.shape[1]
    step_fits = x.stride(0) % ALIGNED == 0 if width % ALIGNED == 0 else x.stride(0) == width
    if x.stride(1) == 1 and step_fits and x.data_ptr() % ALIGNED == 0:
        return x
    return x.new_empty(x.shape).copy_(x)


def attend(query: Tensor, key: Tensor, value: Tensor, where: Sequence[Span], keys: Sequence[Span]) -> Tensor:
    """Attends as `gpu_attention.Attend`, for all requests in one launch, with head dims up to 256. The bits of a
    query's head depend on that, and on the request's keys and values of that head in their order, alone."""
    head_dim = query.shape[2]
    query, key, value = (_in_heads(x) for x in (query, key, value))
    steps = [step // head_dim for x in (query, key, value) for step in x.stride()[:2]]
    sizes, options = attend_sizes(query.dtype, head_dim)
    out = query.new_empty(len(query), query.shape[1] * head_dim)
    grid = -(-longest(where) // int(sizes["QUERIES"])), query.shape[1], len(where)
    kernels.attend[grid](
        *(query, key, value, out, offsets(tuple(where), query.device), offsets(tuple(keys), query.device)),
        *(head_dim**-0.5 * log2(e), *steps, query.shape[1]),
        **sizes,
        **options,
    )
    return out


@cache
def attend_sizes(dtype: torch.dtype, head_dim: int) -> tuple[Mapping[str, int | str], Mapping[str, int]]:
    """(constants of the kernel, how its programs run) for these tensors."""
    is_half, is_wide = dtype.itemsize == 2, head_dim > WIDE
    sizes: Mapping[str, int | str] = {
        "HEAD_DIM": head_dim,
        "WIDTH": max(16, power_of_two(head_dim)),
        "QUERIES": 128 if is_half else 64,
        "KEYS": (64 if is_half else 32) // (2 if is_wide else 1),
        "PRECISION": precision(dtype),
    }
    return sizes, {"num_warps": 8 if is_half else 4, "num_stages": 3 if is_half and not is_wide else 2}


def _in_heads(x: Tensor) -> Tensor:
    """x, [tokens, heads, head dim], or a copy if its steps are not multiples of the head dim."""
    head_dim = x.shape[2]
    is_regular = x.stride(2) == 1 and not any(step % head_dim for step in x.stride()[:2])
    if is_regular and x.data_ptr() % ALIGNED == 0:
        return x
    return x.new_empty(x.shape).copy_(x)


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    """A diffusers `RMSNorm` with weights, of each row of x, [rows, width]; rounds once."""
    x, width = x.contiguous(), x.shape[1]
    out, block = torch.empty_like(x), power_of_two(width)
    if len(x):
        sizes = x.stride(0), width, norm.eps
        kernels.rms_norm[len(x),](x, norm.weight, out, *sizes, BLOCK=block, num_warps=warps(block))
    return out


def precision(dtype: torch.dtype) -> str:
    """Of products inside a kernel: float32 is not rounded to what tensor cores multiply."""
    return "ieee" if dtype == torch.float32 else "tf32"


@cache
def _processors(device: torch.device) -> int:
    """A GPU's multiprocessors, each of which runs one program of `product` at a time; 1 where it is interpreted."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count

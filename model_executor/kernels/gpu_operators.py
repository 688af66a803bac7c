"""The implementation of `Operators` for GPUs: Triton kernels, and attention from `gpu_attention.py`.

Where Triton does not work, or a kernel does not support a shape, PyTorch's operators compute the same up to rounding.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import subprocess
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from types import ModuleType
from typing import Self

import torch
from torch import Tensor

from core.errors import ConfigError
from core.page_scheme import PageLayout
from model_executor.kernels.attention import Attention, KeysValues, Sizes, head_major
from model_executor.kernels.gpu_attention import Attend, Together, best_attend, take_flash_3
from model_executor.kernels.gpu_tables import places, table
from model_executor.kernels.linear import Linear, gpu_linear
from model_executor.kernels.operators import Operators
from model_executor.kernels.ragged import Span
from model_executor.page_cache.pages import Entry, Pages, Quantise, Reader, quantise

logger = logging.getLogger("stencil.worker")

CHUNK = 1024
"""Numbers of a row that one program of `add_gated` processes."""

TILE = 4096
"""Numbers of a page that one program of `read_page` or `quantise` processes."""


LACKING = (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError)
"""Raised by Triton if it is not installed, or finds no C compiler, no Python header or no driver."""

CLOSE = 0.05
"""Largest difference to PyTorch's operators for a kernel to count as working: it may round an int8 page differently,
which is up to 0.02 for the numbers that are tried."""


@cache
def gpu_operators(device: torch.device) -> Operators:
    """Triton's operators where they work, which takes PyTorch's GPU packages on Linux and a C compiler; otherwise
    PyTorch's, with a warning in the log."""
    take_flash_3(device)
    try:
        from model_executor.kernels import triton_kernels

        operators = TritonOperators(triton_kernels)
        _try_out(operators, device)
    except _lacking() as error:
        logger.warning("no Triton kernels, so PyTorch's operators compute instead, and take longer: %r", error)
        return GpuOperators()
    return operators


@cache
def invariant_operators(device: torch.device) -> Operators:
    """Triton's operators for `--batch-invariant`; they have PyTorch choose deterministic convolutions in this process.
    Raises ConfigError where Triton does not work, since nothing else computes so."""
    remedy = "give Triton a C compiler and Python's headers, or leave --batch-invariant out"
    if not isinstance(gpu_operators(device), TritonOperators):
        raise ConfigError(f"--batch-invariant needs Triton, which does not work here, as the log says; {remedy}")
    from model_executor.kernels import invariant, triton_kernels

    operators = invariant.InvariantOperators(triton_kernels)
    try:
        _try_out(operators, device)
        invariant.try_out(device)
    except _lacking() as error:
        raise ConfigError(f"--batch-invariant: its kernels do not work here: {error!r}; {remedy}") from error
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    return operators


def _lacking() -> tuple[type[Exception], ...]:
    """`LACKING`, and what Triton's compiler raises, where it is installed."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return LACKING
    return *LACKING, TritonError


def _try_out(operators: Operators, device: torch.device) -> None:
    """Run every kernel on a few numbers. Raises RuntimeError if results differ from those of PyTorch's operators."""
    for ours, theirs in zip(_few(operators, device), _few(GpuOperators(), device), strict=True):
        if not torch.allclose(ours, theirs, rtol=0.0, atol=CLOSE):
            raise RuntimeError(f"its kernels compute wrongly on {device}")


def _few(operators: Operators, device: torch.device) -> Sequence[Tensor]:
    """The results of all operators for the same few numbers: 2 tokens, 2 heads of 16."""
    qkv, where = torch.linspace(-1.0, 1.0, 192, device=device).view(2, 3, 2, 16), ((0, 2),)
    hidden, gate = qkv[:, 0].flatten(1).clone(), qkv[1:, 2].flatten(1)
    normed = operators.norm_modulate(hidden, where, 1e-6, gate, gate)
    operators.add_gated_(hidden, where, normed.clone(), gate)  # which PyTorch's overwrites
    turns = torch.polar(torch.ones(2, 1, 1, 8, device=device), qkv[:, :1, :1, :8])
    operators.normalise_and_rotate_(qkv[:, :2], turns, 1e-6, [(where, torch.ones(2, 2, 16, device=device))])
    layout = PageLayout(num_blocks=1, num_heads=2, head_dim=16, dtype="int8")
    entry = torch.zeros(layout.entry_bytes(2), dtype=torch.uint8, device=device)
    Entry(entry, layout, 2, operators.quantise).write(0, head_major(qkv[:, 1:]))
    keys_values = KeysValues(head_major(torch.zeros(2, 2, 2, 16, device=device)), 0)
    pages = Pages(layout, 2, entry, entry, 0.25)
    operators.open(pages).read_over(0, keys_values, qkv[:1, 1:], torch.ones(1, dtype=torch.int64, device=device))
    return [normed, hidden, qkv, keys_values.joint]


class GpuOperators(Operators):
    """PyTorch's operators, with attention over whole batches. choose: the attention function for tensors like one, with
    this head dim."""

    def __init__(self, linear: Linear = gpu_linear, choose: Callable[[Tensor, int], Attend] = best_attend) -> None:
        super().__init__(linear)
        self._choose = choose

    def attending(self, attend: Attend) -> Self:
        """A copy of these operators that uses this attention function."""
        twin = copy(self)
        twin._choose = lambda like, head_dim: attend
        return twin

    @property
    def _kernels_digest(self) -> str:
        return torch.nn.attention.current_flash_attention_impl() or ""

    def attention(
        self, sizes: Sizes, heads: int, head_dim: int, like: Tensor, beside: Attention | None = None
    ) -> Attention:
        return Together(sizes, heads, head_dim, like, self._choose(like, head_dim))


class TritonOperators(GpuOperators):
    """Triton's kernels, with PyTorch's operators for shapes that they do not support."""

    def __init__(
        self,
        kernels: ModuleType,
        linear: Linear = gpu_linear,
        choose: Callable[[Tensor, int], Attend] = best_attend,
    ) -> None:
        """kernels: the module `triton_kernels`. linear, choose: as for `GpuOperators`."""
        super().__init__(linear, choose)
        self._kernels = kernels

    @property
    def _kernels_digest(self) -> str:
        return f"triton {importlib.metadata.version('triton')} {super()._kernels_digest}".rstrip()

    @property
    def quantise(self) -> Quantise:
        return self._quantise

    def open(self, pages: Pages) -> Reader:
        """As `Operators.open`; the kernel reads all heads of a page, so PyTorch reads a share of them."""
        return TritonReader(pages, self._kernels) if pages.heads is None else super().open(pages)

    def norm_modulate(self, x: Tensor, where: Sequence[Span], eps: float, factor: Tensor, shift: Tensor) -> Tensor:
        rows, requests = table(tuple(where), x.device)
        width = x.shape[1]
        out = x.new_empty(len(rows), width)
        steps = x.stride(0), factor.stride(0), shift.stride(0)
        block = power_of_two(width)
        self._kernels.norm_modulate[len(rows),](
            x, rows, requests, factor, shift, out, *steps, width, eps, BLOCK=block, num_warps=warps(block)
        )
        return out

    def add_gated_(self, x: Tensor, where: Sequence[Span], y: Tensor, gate: Tensor) -> None:
        rows, requests = table(tuple(where), x.device)
        width = x.shape[1]
        steps = x.stride(0), y.stride(0), gate.stride(0)
        grid = len(rows), -(-width // CHUNK)
        self._kernels.add_gated[grid](x, rows, requests, y, gate, *steps, width, BLOCK=CHUNK)

    def normalise_and_rotate_(
        self, x: Tensor, rotary: Tensor, eps: float, weights: Sequence[tuple[Sequence[Span], Tensor]]
    ) -> None:
        _, kinds, heads, width = x.shape
        if width != power_of_two(width) or not rotary.is_contiguous():
            super().normalise_and_rotate_(x, rotary, eps, weights)
            return
        turns, block = torch.view_as_real(rotary), power_of_two(heads)
        for where, weight in weights:
            rows, _ = table(tuple(where), x.device)
            self._kernels.normalise_and_rotate[len(rows), kinds](
                *(x, rows, weight, turns, x.stride(0), x.stride(1), heads, eps),
                WIDTH=width,
                HEADS=block,
                num_warps=warps(width * block),
            )

    def _quantise(self, x: Tensor, values: Tensor, scales: Tensor) -> None:
        if not values.is_contiguous():  # a share of a page's heads
            quantise(x, values, scales)
            return
        kinds, heads, tokens, width = x.shape
        block = power_of_two(width)
        together = max(1, TILE // block)
        self._kernels.quantise[-(-tokens // together), kinds * heads](
            *(x, values, scales, tokens, heads, *x.stride()[:3]), WIDTH=width, BLOCK=block, TOKENS=together
        )


class TritonReader:
    """Reads pages, interpolates them and overwrites computed tokens, all in one pass."""

    def __init__(self, pages: Pages, kernels: ModuleType) -> None:
        self._near = Entry(pages.near, pages.layout, pages.num_tokens)
        self._far = self._near if pages.far is None else Entry(pages.far, pages.layout, pages.num_tokens)
        self._has_far, self._wait, self._kernels = pages.far is not None, pages.wait, kernels
        self._weights = (1.0 - pages.weight, pages.weight) if self._has_far else (1.0, 0.0)
        self._moments = self._near.moments_towards(self._far if self._has_far else None, pages.weight)
        self._places: dict[int, Tensor] = {}  # text tokens before the image -> as `gpu_tables.places`

    def read(self, block: int, out: Tensor) -> None:
        self._run(block, out, 0, None, None)

    def read_over(self, block: int, keys_values: KeysValues, fresh: Tensor, rows: Tensor) -> None:
        text_tokens = keys_values.text_tokens
        if text_tokens not in self._places:
            self._places[text_tokens] = places(rows, keys_values.num_tokens)
        self._run(block, keys_values.joint, text_tokens, fresh, self._places[text_tokens])

    def moments(self, block: int) -> Tensor:
        if self._wait is not None:
            self._wait(block)
        return self._moments(block)

    def _run(self, block: int, out: Tensor, first: int, fresh: Tensor | None, where: Tensor | None) -> None:
        if self._wait is not None:
            self._wait(block)
        near, far = self._near.values[block], self._far.values[block]
        near_scale, far_scale = near, far
        if self._near.scales is not None and self._far.scales is not None:
            near_scale, far_scale = self._near.scales[block], self._far.scales[block]
        kinds, heads, tokens, width = out.shape
        computed, block_width = near if fresh is None else fresh, power_of_two(width)
        together = max(1, TILE // block_width)
        self._kernels.read_page[-(-tokens // together), kinds * heads](
            *(near, near_scale, far, far_scale, *self._weights, computed, near if where is None else where, out),
            *(tokens, near.shape[2], first, heads, *computed.stride()[:2], *out.stride()[:3]),
            WIDTH=width,
            BLOCK=block_width,
            TOKENS=together,
            HAS_FAR=self._has_far,
            HAS_SCALES=self._near.scales is not None,
            HAS_FRESH=fresh is not None,
        )


def power_of_two(number: int) -> int:
    """The smallest power of two >= number."""
    return 1 << (number - 1).bit_length()


def warps(numbers: int) -> int:
    """Warps, of 32 threads each, for a program that processes `numbers` at a time."""
    return max(1, min(16, numbers // 512))

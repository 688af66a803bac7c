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
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from core.errors import ConfigError
from core.page_scheme import PageLayout
from model_executor.kernels.attention import Attention, KeysValues, Projected, Sizes, head_major
from model_executor.kernels.gpu_attention import ROWS, Attend, Together, best_attend, take_flash_3
from model_executor.kernels.gpu_inputs import TritonTogether
from model_executor.kernels.gpu_pages import TritonReader
from model_executor.kernels.gpu_residual import TritonResidual
from model_executor.kernels.gpu_sizes import CHUNK, TILE, power_of_two, warps
from model_executor.kernels.gpu_tables import table
from model_executor.kernels.linear import Linear, gpu_linear
from model_executor.kernels.operators import Operators
from model_executor.kernels.ragged import Span
from model_executor.kernels.residual import Addition, Norm, Residual
from model_executor.page_cache.pages import PageEntry, Pages, Quantise, Reader, quantise

if TYPE_CHECKING:
    from model_executor.kernels.unet_operators import UnetOperators

logger = logging.getLogger("stencil.worker")

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
def _unet_operators(device: torch.device) -> UnetOperators | None:
    """Triton's operators of UNets where they work; else None, with a warning in the log."""
    try:
        from model_executor.kernels import unet_kernels
        from model_executor.kernels.unet_operators import UnetOperators, try_out

        operators = UnetOperators(unet_kernels)
        try_out(operators, device)
    except _lacking() as error:
        logger.warning("no Triton kernels for UNets, whose layers run as diffusers has them, and longer: %r", error)
        return None
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
    turns = torch.polar(torch.ones(2, 1, 1, 8, device=device), qkv[:, :1, :1, :8])
    layout = PageLayout(num_blocks=1, num_heads=2, head_dim=16, dtype="int8")
    entry = torch.zeros(layout.entry_bytes(2), dtype=torch.uint8, device=device)
    PageEntry(entry, layout, 2, operators.quantise).write(0, head_major(qkv[:, 1:]))
    keys_values = KeysValues(head_major(torch.zeros(2, 2, 2, 16, device=device)), 0)
    pages = Pages(layout, 2, entry, entry, 0.25)
    second = torch.ones(1, dtype=torch.int64, device=device)
    operators.open(pages).read_over(0, keys_values, qkv[:1, 1:], second)
    attended = _few_attended(operators, qkv, turns, TrialSource(pages, second, operators))
    operators.normalise_and_rotate_(qkv[:, :2], turns, 1e-6, [(where, torch.ones(2, 2, 16, device=device))])
    gated = operators.swiglu(qkv.flatten(1))
    return [*_few_normed(operators, qkv, where), qkv, gated, keys_values.joint, *attended]


def _few_normed(operators: Operators, qkv: Tensor, where: Sequence[Span]) -> Sequence[Tensor]:
    """A hidden state that is normed, added to and normed, and added to: with layer norms, and with root-mean-square
    norms of state and additions."""
    gate, results = qkv[1:, 2].flatten(1), list[Tensor]()
    for shift, norm_eps in ((gate, None), (None, 1e-6)):
        residual, norm = operators.residual(qkv[:, 0].flatten(1).clone()), Norm(where, gate, shift)
        normed = residual.normed(1e-6, norm)
        for _ in range(2):  # PyTorch's operators overwrite what they add
            residual.add(Addition(where, normed[0].clone(), gate, norm_eps=norm_eps))
            normed += residual.normed(1e-6, norm)
        residual.add(Addition(where, normed[0].clone(), gate, norm_eps=norm_eps))
        results += [*normed, residual.hidden]
    return results


def _few_attended(operators: Operators, qkv: Tensor, turns: Tensor, source: TrialSource) -> Sequence[Tensor]:
    """The attention of two requests with a text token and two image tokens each, one of which is computed."""
    attention = operators.attention([(1, 2), (1, 2)], 2, 16, qkv)
    weight, turns = torch.ones(2, 2, 16, device=qkv.device), torch.cat([turns, turns])
    parts = [
        Projected(part.clone(), where, weight, 1e-6)
        for part, where in ((qkv, ((0, 1), (2, 3))), (qkv.flip(0), ((1, 2), (3, 4))))
    ]
    return operators.attend(attention, 0, 0, parts, turns, [source, source])


@dataclass(frozen=True, slots=True)
class TrialSource:
    """A request of one text token that reads pages."""

    pages: Pages
    active: Tensor  # the image tokens that it computes
    operators: Operators
    is_in_order: ClassVar[bool] = True

    def computed(self, number: int) -> Tensor | None:
        return self.active

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        rows = torch.cat([torch.zeros_like(self.active), self.active + 1])
        self.operators.open(self.pages).read_over(page, keys_values, fresh, rows)

    def store(self, page: int, image: Tensor) -> None:
        """Nothing is kept."""


class GpuOperators(Operators):
    """PyTorch's operators, with attention over whole batches. choose: the attention function for tensors like one, with
    this head dim."""

    def __init__(self, linear: Linear = gpu_linear, choose: Callable[[Tensor, int], Attend] = best_attend) -> None:
        super().__init__(linear)
        self._choose = choose

    @property
    def query_tile(self) -> int:
        return ROWS

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

    def reads_page_tables(self, head_dim: int, *, has_norm: bool) -> bool:
        return not has_norm or head_dim == power_of_two(head_dim)

    @property
    def quantise(self) -> Quantise:
        return self._quantise

    def of_unets(self, device: torch.device) -> UnetOperators | None:
        """Not while layers are compiled, which the compiler sees whole."""
        return None if self._compiles else _unet_operators(device)

    def open(self, pages: Pages) -> Reader:
        """As `Operators.open`; the kernel reads all heads of a page, so PyTorch reads a share of them."""
        return TritonReader(pages, self._kernels) if pages.heads is None else super().open(pages)

    def residual(self, hidden: Tensor) -> Residual:
        return TritonResidual(hidden, self._kernels)

    def attention(
        self, sizes: Sizes, heads: int, head_dim: int, like: Tensor, beside: Attention | None = None
    ) -> Attention:
        other = beside if isinstance(beside, TritonTogether) else None
        attend = self._choose(like, head_dim)
        return TritonTogether(sizes, heads, head_dim, like, attend, self._kernels, other)

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

    def swiglu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows, width = len(x), x.shape[1] // 2
        out = x.new_empty(rows, width) if out is None else out
        self._kernels.swiglu[rows, -(-width // CHUNK)](x, out, x.stride(0), out.stride(0), width, BLOCK=CHUNK)
        return out

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

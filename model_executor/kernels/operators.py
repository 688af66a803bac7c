"""Operators: the interface through which denoisers compute, so that model code does not depend on the device.

The implementation is chosen once, when a denoiser is made. Here are PyTorch's operators, with compiled kernels on one
CPU core (`cpu_kernels.py`); `gpu_operators.py` has those of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.config import KernelChoice
from core.errors import ConfigError
from model_executor.kernels.attention import (
    Attention,
    KeysValues,
    KeyValueSource,
    OneByOne,
    Projected,
    ProjectionAttention,
    Sizes,
    attend,
    normalise_and_rotate_,
)
from model_executor.kernels.cpu_kernels import (
    Kernels,
    PageKernels,
    best_kernels,
    best_page_kernels,
    can_quantise,
    can_swiglu,
)
from model_executor.kernels.linear import Linear, best_linear, plain_linear
from model_executor.kernels.ragged import Span, gather, interleave, spans
from model_executor.kernels.residual import Residual
from model_executor.kernels.tile_attention import PlacedKeysValues, attend_in_place
from model_executor.page_cache.pages import Pages, Quantise, Reader, quantise

if TYPE_CHECKING:
    from model_executor.kernels.unet_operators import UnetOperators

RECOMPILES = 64
"""Limit on torch.compile's recompilations of a function: Stable Diffusion XL has a dozen shapes of residual blocks,
and PyTorch's default is 8."""


class Operators:
    """PyTorch's operators. linear: how linear layers run; with `plain_linear` everything is rounded as in diffusers,
    with others less often. kernels: compiled kernels to use where they apply, None for none. page_kernels: those that
    read pages, if there are no others."""

    is_invariant = False
    """Whether they are those of `--batch-invariant` on a GPU, see `invariant.py`."""

    def __init__(self, linear: Linear, kernels: Kernels | None = None, page_kernels: PageKernels | None = None) -> None:
        self.linear, self.kernels, self._page_kernels = linear, kernels, kernels or page_kernels
        self._is_fused = linear is not plain_linear
        self._compiles = False

    def compiling(self) -> Self:
        """A copy of these operators that compiles layers with torch.compile where models ask for it."""
        twin = copy(self)
        twin._compiles = True
        return twin

    def reads_page_tables(self, head_dim: int, *, has_norm: bool) -> bool:
        """Whether attention with heads of this size finds pages by `Pages.table`, which a CUDA graph needs. has_norm:
        of queries and keys, followed by rotary embedding."""
        return False

    @property
    def query_tile(self) -> int:
        """Queries that attention processes at a time: fewer take as long."""
        return 1

    @property
    def digest(self) -> str:
        """Identifies the code that computes, besides PyTorch's kernels, because other code may round differently."""
        parts = ["" if self._is_fused else "plain", self._kernels_digest, "compiled" if self._compiles else ""]
        return " ".join(filter(None, parts))

    @property
    def _kernels_digest(self) -> str:
        return "" if self._page_kernels is None else self._page_kernels.digest

    @property
    def quantise(self) -> Quantise:
        """How int8 pages are made; see `pages.quantise`."""
        return quantise if self.kernels is None else partial(_quantise, self.kernels)

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function of modules and tensors, compiled for tensors of any size; as it is unless compiling."""
        if not self._compiles:
            return function
        allow_recompiles()
        return torch.compile(function, dynamic=True)

    def compile_(self, layers: Iterable[nn.Module]) -> None:
        """Compile these layers in place; does nothing unless compiling."""
        if self._compiles:
            allow_recompiles()
            for layer in layers:
                layer.compile(dynamic=True)

    def of_unets(self, device: torch.device) -> UnetOperators | None:
        """What computes the layers of UNets besides; None: they run as diffusers has them."""
        return None

    def open(self, pages: Pages) -> Reader:
        """A reader of these pages. The entries' bytes must not change while it is used."""
        return pages.open(self._page_kernels)

    def residual(self, hidden: Tensor) -> Residual:
        """The hidden state of transformer blocks. hidden: [tokens, width], changed in place."""
        return Residual(hidden, fused=self._is_fused, kernels=self.kernels)

    def rms_norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        """A root-mean-square norm with weights, of each row of x, [rows, width]."""
        normed: Tensor = norm(x)
        return normed

    def swiglu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """silu(gate) * up, of rows that hold both side by side. x: [rows, 2 * width]; out: [rows, width], to write to;
        None: a new tensor. Both with contiguous rows. Returns `out`."""
        gate, up = x.chunk(2, dim=1)
        if self.kernels is not None and can_swiglu(x):
            out = x.new_empty(up.shape) if out is None else out
            self.kernels.swiglu(x, out)
            return out
        activated: Tensor = F.silu(gate) if out is None else torch.ops.aten.silu.out(gate, out=out)
        return activated.mul_(up)

    def normalise_and_rotate_(
        self, x: Tensor, rotary: Tensor, eps: float, weights: Sequence[tuple[Sequence[Span], Tensor]]
    ) -> None:
        """See `attention.normalise_and_rotate_`."""
        normalise_and_rotate_(x, rotary, eps, weights, self.kernels)

    def attention(
        self, sizes: Sizes, heads: int, head_dim: int, like: Tensor, beside: Attention | None = None
    ) -> Attention:
        """Attention for one pass over a batch. like: has the dtype and device to compute in. beside: another attention
        of the same pass with at least as many tokens, whose buffer this one may share: they never run at the same time.
        """
        kernels, room = self.kernels, beside.room if isinstance(beside, OneByOne) else None
        if kernels is not None and kernels.order(like.dtype) == "tiles":
            work = kernels.attention_room(head_dim, max(map(sum, sizes)))
            in_place = partial(attend_in_place, kernels=kernels, room=work)
            return OneByOne(sizes, heads, head_dim, like, PlacedKeysValues, in_place, room)
        one: Callable[..., None] = partial(attend, linear=self.linear, kernels=kernels)
        return OneByOne(sizes, heads, head_dim, like, KeysValues, one, room)

    def attend(
        self,
        attention: Attention,
        number: int,
        page: int,
        parts: Sequence[Projected],
        rotary: Tensor,
        sources: Sequence[KeyValueSource],
        out: Tensor | None = None,
    ) -> list[Tensor]:
        """Norm, rotary embedding and attention of block `number`. parts: of each kind of token, whose `qkv` may be
        overwritten. rotary: complex64 [tokens, 1, 1, head dim / 2]. number, page, sources: as for `Attention`.

        Returns for each part [rows, heads * head dim]; of one part alone this is `out`, with contiguous rows, if that
        is given.
        """
        if isinstance(attention, ProjectionAttention):
            outputs = attention.of_projections(number, page, parts, rotary, sources)
            if outputs is not None:
                return outputs if out is None else [out.copy_(outputs[0])]
        first, *others = parts
        if not others:
            qkv = first.qkv
            if first.weight is not None:
                turns = rotary if len(rotary) == len(qkv) else gather(rotary, first.where)
                self.normalise_and_rotate_(qkv[:, :2], turns, first.eps, [([(0, len(qkv))], first.weight)])
            where = spans(stop - start for start, stop in first.where)
            return [attention(number, page, qkv, where, sources, out)]
        qkv = interleave([part.qkv for part in parts], [part.where for part in parts])
        weights = [(part.where, part.weight) for part in parts if part.weight is not None]
        if len(weights) == len(parts):
            self.normalise_and_rotate_(qkv[:, :2], rotary, first.eps, weights)
        where = tuple((start, stop) for (start, _), (_, stop) in zip(first.where, others[-1].where, strict=True))
        attended = attention(number, page, qkv, where, sources)
        return [gather(attended, part.where) for part in parts]


def _quantise(kernels: Kernels, x: Tensor, values: Tensor, scales: Tensor) -> None:
    if can_quantise(x):
        kernels.quantise(x, values, scales)
    else:
        quantise(x, values, scales)


def best_operators(device: torch.device) -> Operators:
    """The fastest operators for a device."""
    if device.type == "cpu":
        return Operators(best_linear(), best_kernels(), best_page_kernels())
    if device.type != "cuda":
        return Operators(best_linear())
    from model_executor.kernels.gpu_operators import gpu_operators  # Triton is not everywhere, nor needed on a CPU

    return gpu_operators(device)


def chosen_operators(choice: KernelChoice, device: torch.device, *, batch_invariant: bool = False) -> Operators:
    """The operators that `--kernels` names. batch_invariant: those of `--batch-invariant`, which on a GPU are others
    than those of `auto`. Raises ConfigError for `compile` on a CPU, since PyTorch cannot compile oneDNN's layers, and
    for batch_invariant where Triton does not work."""
    match choice:
        case "auto" if batch_invariant and device.type == "cuda":
            from model_executor.kernels.gpu_operators import invariant_operators

            return invariant_operators(device)
        case "torch":
            return Operators(plain_linear)
        case "auto":
            return best_operators(device)
        case "compile" if device.type == "cpu":
            raise ConfigError("--kernels compile needs a GPU; use auto")
        case "compile":
            return best_operators(device).compiling()


def allow_recompiles() -> None:
    """Raise PyTorch's limit, above which it runs layers uncompiled, to RECOMPILES."""
    torch.compiler.config.recompile_limit = RECOMPILES

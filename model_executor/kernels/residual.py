"""The hidden state of transformer blocks: layers add to it, and norms read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model_executor.kernels.cpu_kernels import Kernels, can_norm
from model_executor.kernels.ragged import Span, add_gated_, norm_modulate, pieces, rms_modulate, rms_scales

FLOAT16_MAX = 65504.0


class Addition(NamedTuple):
    """What a layer adds to some rows of the hidden state: gate * y, or gate * the root-mean-square norm of y."""

    where: Sequence[Span]  # of each request, the rows of the hidden state
    y: Tensor  # [rows, width], one span after the other; may be overwritten
    gate: Tensor  # [requests, width]
    is_clipped: bool = False  # whether the sum is clipped to the range of float16, if that is the dtype
    norm_eps: float | None = None  # of the norm of y; None: y has none


class Norm(NamedTuple):
    """A norm of some rows of the hidden state, times factor: a layer norm, plus shift, or a root-mean-square norm."""

    where: Sequence[Span]  # of each request, the rows of the hidden state
    factor: Tensor  # [requests, width]
    shift: Tensor | None  # [requests, width]; None: it is a root-mean-square norm


class Residual:
    """The hidden state, with PyTorch's operators, or compiled kernels where they apply."""

    def __init__(self, hidden: Tensor, *, fused: bool, kernels: Kernels | None = None) -> None:
        """hidden: [tokens, width], changed in place. fused: see `ragged.norm_modulate`. kernels: None for PyTorch's
        operators; what they compute is rounded once."""
        self._hidden, self._fused = hidden, fused
        self._compiled = kernels if can_norm(hidden) else None

    @property
    def hidden(self) -> Tensor:
        """The state after all additions, [tokens, width]."""
        return self._hidden

    def add(self, *additions: Addition) -> None:
        """Add to rows, of which no two additions have the same. Additions made together have equal norms, or none."""
        for each in additions:
            if self._compiled is None:
                self._add(each)
            else:
                self._add_by(self._compiled, each)

    def normed(self, eps: float, *norms: Norm) -> list[Tensor]:
        """For each norm its rows, normed: [rows, width], one span after the other. All norms are of one kind."""
        if self._compiled is None:
            return [self._normed(eps, each) for each in norms]
        return [self._normed_by(self._compiled, eps, each) for each in norms]

    def _add(self, addition: Addition) -> None:
        where, y, gate, is_clipped, norm_eps = addition
        add_gated_(self._hidden, where, y if norm_eps is None else y.mul_(rms_scales(y, norm_eps)), gate)
        if is_clipped and self._hidden.dtype == torch.float16:
            for piece in pieces(self._hidden, where):
                piece.clip_(-FLOAT16_MAX, FLOAT16_MAX)

    def _normed(self, eps: float, norm: Norm) -> Tensor:
        if norm.shift is None:
            return rms_modulate(self._hidden, norm.where, eps, norm.factor)
        return norm_modulate(self._hidden, norm.where, eps, norm.factor, norm.shift, fused=self._fused)

    def _add_by(self, kernels: Kernels, addition: Addition) -> None:
        where, y, gate, _, norm_eps = addition
        kernels.add_gated_(self._hidden, where, y.contiguous(), self._rows(gate), norm_eps)

    def _normed_by(self, kernels: Kernels, eps: float, norm: Norm) -> Tensor:
        where, factor, shift = norm
        out = self._hidden.new_empty(sum(stop - start for start, stop in where), self._hidden.shape[1])
        kernels.norm(self._hidden, where, eps, self._rows(factor), None if shift is None else self._rows(shift), out)
        return out

    def _rows(self, x: Tensor) -> Tensor:
        """Parts of the modulation, [requests, width], as kernels read them."""
        x = x.to(self._hidden.dtype)
        return x if x.stride(1) == 1 else x.contiguous()

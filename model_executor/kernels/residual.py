"""The hidden state of transformer blocks: layers add to it, and norms read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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
    """The hidden state, with PyTorch's operators."""

    def __init__(self, hidden: Tensor, *, fused: bool) -> None:
        """hidden: [tokens, width], changed in place. fused: see `ragged.norm_modulate`."""
        self._hidden, self._fused = hidden, fused

    @property
    def hidden(self) -> Tensor:
        """The state after all additions, [tokens, width]."""
        return self._hidden

    def add(self, *additions: Addition) -> None:
        """Add to rows, of which no two additions have the same. Additions made together have equal norms, or none."""
        for each in additions:
            y = each.y if each.norm_eps is None else each.y.mul_(rms_scales(each.y, each.norm_eps))
            add_gated_(self._hidden, each.where, y, each.gate)
            if each.is_clipped and self._hidden.dtype == torch.float16:
                for piece in pieces(self._hidden, each.where):
                    piece.clip_(-FLOAT16_MAX, FLOAT16_MAX)

    def normed(self, eps: float, *norms: Norm) -> list[Tensor]:
        """For each norm its rows, normed: [rows, width], one span after the other. All norms are of one kind."""
        return [self._normed(eps, each) for each in norms]

    def _normed(self, eps: float, norm: Norm) -> Tensor:
        if norm.shift is None:
            return rms_modulate(self._hidden, norm.where, eps, norm.factor)
        return norm_modulate(self._hidden, norm.where, eps, norm.factor, norm.shift, fused=self._fused)

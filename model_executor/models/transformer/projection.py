"""Projection: an attention's queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model_executor.kernels.attention import Projected
from model_executor.kernels.linear_groups import AnyGroup, MakeGroup
from model_executor.kernels.low_rank import Segments
from model_executor.kernels.operators import Operators
from model_executor.kernels.ragged import Span
from model_executor.kernels.tile_blocks import BlockLayers


class Projection:
    """The layers that give an attention's queries, keys and values for one kind of token, with their norm, if any."""

    def __init__(self, attn: Any, added: str, group: MakeGroup) -> None:
        """added: "" for image tokens, "added" for text tokens, as in diffusers' names of their layers."""
        norms = [getattr(attn, f"norm_{added}_{part}" if added else f"norm_{part}") for part in "qk"]
        self._layers = group(*self._layers_of(attn, added))
        self._heads = attn.heads
        self.eps = 0.0 if norms[0] is None else norms[0].eps
        self.weight = None if norms[0] is None else _qk_weight(norms[0], norms[1], attn.heads)

    @staticmethod
    def _layers_of(attn: Any, added: str) -> list[Any]:
        names = ("add_q_proj", "add_k_proj", "add_v_proj") if added else ("to_q", "to_k", "to_v")
        return [getattr(attn, name) for name in names]

    def __call__(self, x: Tensor, where: Segments) -> Tensor:
        """[tokens, hidden] -> [tokens, 3 * hidden], before norm and rotary embedding. where: the rows that patches
        change."""
        return self._layers(x, where)

    def heads(self, x: Tensor, where: Segments) -> Tensor:
        """What `__call__` gives, by head: [tokens, 3, heads, head dim]."""
        return self._in_heads(self(x, where))

    def _in_heads(self, qkv: Tensor) -> Tensor:
        return qkv.view(len(qkv), 3, self._heads, qkv.shape[1] // (3 * self._heads))

    def project(self, x: Tensor, where: Segments, rows: Sequence[Span]) -> Projected:
        """Queries, keys and values for attention. rows: each request's rows of the stream."""
        return Projected(self.heads(x, where), rows, self.weight, self.eps)

    def beside(self, out: AnyGroup, up: AnyGroup, down: AnyGroup | None, eps: float) -> BlockLayers:
        """With the other layers of a block, as for `BlockLayers`."""
        return BlockLayers(self._layers, out, up, down, self.weight, self.eps, eps)

    def turn_(self, x: Tensor, rotary: Tensor, operators: Operators, first: int = 0) -> None:
        """Apply norm and rotary embedding in place. x: [tokens, n, heads, head dim], queries (0) and keys (1), starting
        with `first`."""
        if self.weight is not None:
            operators.normalise_and_rotate_(x, rotary, self.eps, [([(0, len(x))], self.weight[first:])])


class FusedProjection(Projection):
    """That of an attention whose one layer also gives the numbers that an MLP reads, after queries, keys and values."""

    def __init__(self, attn: Any, group: MakeGroup) -> None:
        super().__init__(attn, "", group)
        self._width: int = 3 * attn.inner_dim

    @staticmethod
    def _layers_of(attn: Any, added: str) -> list[Any]:
        return [attn.to_qkv_mlp_proj]

    def heads(self, x: Tensor, where: Segments) -> Tensor:
        return self._in_heads(self(x, where)[:, : self._width])

    def both(self, x: Tensor, where: Segments, rows: Sequence[Span]) -> tuple[Projected, Tensor]:
        """Returns what `project` does, and what the MLP reads."""
        product = self(x, where)
        qkv = self._in_heads(product[:, : self._width])
        return Projected(qkv, rows, self.weight, self.eps), product[:, self._width :]


def _qk_weight(query_norm: Any, key_norm: Any, heads: int) -> Tensor:
    """Weights of the norms of queries and keys, float32 [2, heads, head dim]. Repeated for every head: multiplying is
    then faster, by a quarter of a pass."""
    weight = torch.stack([query_norm.weight, key_norm.weight]).detach().float()
    return weight[:, None].repeat(1, heads, 1)

"""Transformer blocks on a CPU with AMX, in bfloat16: one compiled function does what precedes attention, and one what
follows it.

A mask-aware step of the embedded model, of 50 tokens, took 0.72 of the time that it takes with a call from Python for
each operator. Those are the same functions, so the bits are the same, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_float, c_int, c_long, c_void_p
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model_executor.kernels.attention import Attention, KeyValueSource
from model_executor.kernels.cpu_kernels import BLOCK_DEPTH, LANES, TILE_DEPTH, BlockKind, span_table
from model_executor.kernels.linear_groups import AnyGroup, KernelGroup
from model_executor.kernels.ragged import Packing, Span


class _Layer(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("inputs", c_int), ("outputs", c_int))


class _Layers(Structure):
    _fields_ = (
        *((name, _Layer) for name in ("qkv", "out", "up", "down")),
        ("qk_norm", c_void_p),
        ("qk_eps", c_float),
        ("eps", c_float),
    )


class _Rows(Structure):
    _fields_ = (("spans", c_void_p), ("requests", c_int), ("rows", c_long), ("is_one_run", c_int))


class _Pass(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("hidden", "rotary", "qkv", "attended", "normed", "summed", "inner")),
        *((name, c_int) for name in ("width", "heads", "head_width")),
    )


class BlockLayers(NamedTuple):
    """The layers for one kind of token in a block."""

    qkv: AnyGroup
    out: AnyGroup
    up: AnyGroup
    down: AnyGroup | None  # None: `out` reads what attention and `up` give
    qk_norm: Tensor | None  # of queries and keys, float32 [2, heads, head dim]; None: no norm, no rotation
    qk_eps: float
    eps: float  # of the norms of the hidden state


class TileBlock:
    """A block's layers as C reads them. Made by `tile_block`."""

    def __init__(self, kind: BlockKind, layers: Sequence[BlockLayers], groups: Sequence[KernelGroup]) -> None:
        """layers: of text and image tokens, or those of all tokens. groups: all of these."""
        first = layers[0]
        assert first.qk_norm is not None
        self.kernels = groups[0].kernels
        self.begin, self.end = self.kernels.block_halves[kind]
        _, self.heads, self.head_dim = first.qk_norm.shape
        attended, inner = self.heads * self.head_dim, max(each.up.num_outputs for each in layers)
        self.is_joint = kind == "single"
        self.inner = attended + inner if self.is_joint else max(3 * attended, inner)
        """Numbers of a token that its MLP, or its queries, keys and values, need room for."""
        self.table = (_Layers * len(layers))(*map(_layers, layers))
        self._owners = layers  # of the memory that the table points to


class TilePass:
    """What the blocks of a pass share, as long as their tokens are the same."""

    def __init__(
        self, block: TileBlock, attention: Attention, hidden: Tensor, rotary: Tensor, packing: Packing
    ) -> None:
        """block: any of them. hidden: [tokens, width], contiguous, changed in place. rotary: complex64 [tokens, 1, 1,
        head dim / 2]."""
        tokens, width = hidden.shape
        self._attention, self._where, self._inner = attention, packing.joint, hidden.new_empty(0, 0)
        self._qkv = hidden.new_empty(tokens, 3, block.heads, block.head_dim)
        self._attended = hidden.new_empty(tokens, block.heads * block.head_dim)
        matrices = hidden, rotary, self._qkv, self._attended, *hidden.new_empty(2, tokens, width)
        self._table = _Pass(*(each.data_ptr() for each in matrices), None, width, block.heads, block.head_dim)
        kinds = packing.joint_text, packing.joint_image, packing.joint
        spans = list(map(span_table, kinds))
        self._rows = (_Rows * 3)(*map(_rows, spans, kinds))
        self._owners = matrices, spans  # of the memory that the tables point to

    def run(
        self, block: TileBlock, number: int, page: int, parts: Sequence[Tensor], sources: Sequence[KeyValueSource]
    ) -> None:
        """Run block `number`. parts: of its modulation, [requests, width] each, views of one matrix side by side."""
        if block.inner != self._inner.shape[1]:
            self._inner = self._attended.new_empty(len(self._attended), block.inner)
            self._table.inner = self._inner.data_ptr()
        operands = byref(self._table), block.table, self._rows, parts[0].data_ptr(), parts[0].stride(0)
        block.begin(*operands)
        out = self._inner[:, : self._attended.shape[1]] if block.is_joint else self._attended
        self._attention(number, page, self._qkv, self._where, sources, out)
        block.end(*operands)


def tile_block(kind: BlockKind, layers: Sequence[BlockLayers]) -> TileBlock | None:
    """None if the compiled functions do not support these layers."""
    groups = [each for its in layers for each in (its.qkv, its.out, its.up, its.down) if each is not None]
    tiled = [each for each in groups if isinstance(each, KernelGroup) and _is_tiled(each)]
    has_norms = all(each.qk_norm is not None and each.qk_norm.shape[2] % LANES == 0 for each in layers)
    fit = all(each.num_inputs % TILE_DEPTH == 0 and each.num_inputs <= BLOCK_DEPTH for each in groups)
    return TileBlock(kind, layers, tiled) if has_norms and fit and len(tiled) == len(groups) else None


def _is_tiled(group: KernelGroup) -> bool:
    """Whether C can read its weights and biases: of others, `Kernels.linear` says what is wrong."""
    order, weight, bias = group.packed
    return order == "tiles" and weight.dtype == bias.dtype == torch.bfloat16


def _layers(its: BlockLayers) -> _Layers:
    assert its.qk_norm is not None
    down = _Layer() if its.down is None else _layer(its.down)
    return _Layers(_layer(its.qkv), _layer(its.out), _layer(its.up), down, its.qk_norm.data_ptr(), its.qk_eps, its.eps)


def _layer(group: AnyGroup) -> _Layer:
    assert isinstance(group, KernelGroup)
    weight, bias = group.packed.weight, group.packed.bias
    return _Layer(weight.data_ptr(), bias.data_ptr(), group.num_inputs, group.num_outputs)


def _rows(table: Any, where: Sequence[Span]) -> _Rows:
    is_one_run = all(stop == start for (_, stop), (start, _) in pairwise(where))
    return _Rows(addressof(table), len(where), sum(stop - start for start, stop in where), is_one_run)

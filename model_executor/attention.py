"""Attention of a ragged batch, and rotary positions.

`attend` is the one place where queries meet keys: each request's queries see that request's own keys, whatever else is
in the batch. There is no mask and no padding, since masks push scaled-dot-product attention off its fast path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.ragged import Span


def attend(query: Tensor, key: Tensor, value: Tensor, where: Sequence[Span]) -> Tensor:
    """Attention within each span. query, key, value: [tokens, heads, head dim] -> [tokens, heads * head dim]."""
    if len(where) == 1:
        return _attend_one(query, key, value).flatten(1)
    out = torch.empty_like(query)
    for start, stop in where:
        out[start:stop] = _attend_one(query[start:stop], key[start:stop], value[start:stop])
    return out.flatten(1)


def _attend_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[queries, heads, head dim] over [keys, heads, head dim]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding of interleaved pairs. x: [tokens, heads, head dim], contiguous; rotary: complex64 [tokens, 1,
    head dim / 2].

    The complex product makes the same roundings as diffusers' `apply_rotary_emb` in a fifth of its time; float32 inputs
    are rotated in place.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs.mul_(rotary)).flatten(-2).to(x.dtype)

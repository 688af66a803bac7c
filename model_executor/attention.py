"""Attention of one request, and rotary positions.

`attend` is the one place where queries meet keys: a request's queries see that request's own keys, whatever else is in
the batch. There is no mask and no padding, since masks push scaled-dot-product attention off its fast path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.kernels import Kernels, can_attend, can_rotate
from model_executor.linear import Linear, fused_linear, has_onednn, onednn_product
from model_executor.ragged import Span, pieces

SCORE_BYTES = 5 << 18
"""Scores held at once. Each product rearranges its keys anew, so fewer and larger ones won until the scores left a
core's cache: with 166 queries over 1,088 keys, this took 0.82 of the time that 512 KiB did."""


class KeysValues:
    """Keys and values of one request in the block at hand, [2, heads, text and image tokens, head dim].

    The views that every block needs are made once: a step of few tokens spends as long on making views as on some of
    its products.
    """

    def __init__(self, room: Tensor, heads: int, head_dim: int, text_tokens: int, image_tokens: int) -> None:
        """room: memory for them, which other requests may use before and after: [numbers]."""
        tokens = text_tokens + image_tokens
        self.joint = room[: 2 * heads * tokens * head_dim].view(2, heads, tokens, head_dim)
        self.image = self.joint[:, :, text_tokens:]
        self.keys, values = self.joint
        self.value_heads = values.transpose(1, 2).unbind()  # each [head dim, tokens]

    def put(self, fresh: Tensor, rows: Tensor | None) -> None:
        """What the block computed, [computed tokens, 2, heads, head dim], into these rows; None for all."""
        if rows is None:
            self.joint.copy_(head_major(fresh))
        else:
            self.joint.index_copy_(2, rows, head_major(fresh))


def head_major(x: Tensor) -> Tensor:
    """[tokens, n, heads, head dim] -> [n, heads, tokens, head dim], a view."""
    return x.permute(1, 2, 0, 3)


def attend(query: Tensor, keys_values: KeysValues, linear: Linear, kernels: Kernels | None = None) -> Sequence[Tensor]:
    """query: [queries, heads, head dim] -> parts of [queries, heads * head dim], left to right.

    With `fused_linear` or kernels a query's result has the same bits whatever the number of other queries.
    """
    if kernels is not None and can_attend(query, keys_values.joint.shape[2]):
        return [kernels.attend(query, keys_values.joint)]
    if linear is fused_linear and has_onednn(query):
        return _attend_by_products(query, keys_values)
    key, value = keys_values.joint[None].unbind(1)
    return [F.scaled_dot_product_attention(query.transpose(0, 1)[None], key, value)[0].transpose(0, 1).flatten(1)]


def _attend_by_products(query: Tensor, keys_values: KeysValues) -> Sequence[Tensor]:
    """Two oneDNN products a head. Of the time of PyTorch's scaled-dot-product attention, whose products are MKL's, this
    took 0.5 to 0.7 from 100 queries over 1,100 keys up in float32 and bfloat16, 0.7 with 280 queries over 280 keys and
    1.2 with 50, on one Zen 5 core; `torch.bmm` took 2 in float32 where keys are many.
    """
    queries, heads, head_dim = query.shape
    scaled = query.new_empty(heads, queries, head_dim, dtype=torch.float32)
    scaled.copy_(query.transpose(0, 1)).mul_(head_dim**-0.5)
    step = max(2, SCORE_BYTES // (keys_values.joint.shape[2] * scaled.element_size()))
    parts = zip(scaled.unbind(), keys_values.keys.float().unbind(), keys_values.value_heads, strict=True)
    return [_attend_head(*part, step) for part in parts]


def _attend_head(query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
    """query: float32 [queries, head dim], scaled; key: float32 [keys, head dim]; value: [head dim, keys]; step: queries
    at a time.

    Scores are float32 in bfloat16 too: rounded to 8 bits, a score of 20 would be off by 6 % of its weight.
    """
    if len(query) > step:
        return torch.cat([_attend_head(chunk, key, value, step) for chunk in query.split(step)])
    weights = torch.softmax(onednn_product(query, key), dim=-1)
    return onednn_product(weights.to(value.dtype), value)


def normalise_and_rotate_(
    x: Tensor,
    rotary: Tensor,
    eps: float,
    weights: Sequence[tuple[Sequence[Span], Tensor]],
    kernels: Kernels | None = None,
) -> None:
    """Norm and rotary embedding of queries and keys, in place, without kernels with the roundings of diffusers'
    attention.

    x: [tokens, n, heads, head dim]; rotary: complex64 [tokens, 1, 1, head dim / 2]; weights: float32 [n, heads, head
    dim] of the norm, and the tokens that they are for.
    """
    if kernels is not None and can_rotate(x):
        for where, weight in weights:
            for piece, turn in zip(pieces(x, where), pieces(rotary, where), strict=True):
                kernels.normalise_and_rotate_(piece, turn, eps, weight)
        return
    wide = x.float()  # x itself in float32
    _rms_norm_(wide, eps)
    for where, weight in weights:
        for piece in pieces(wide, where):
            piece.mul_(weight)
    if wide.dtype == x.dtype:
        _rotate_(wide, rotary)
    else:
        x.copy_(_rotate_(wide.to(x.dtype).float(), rotary))


def _rms_norm_(x: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension in place, without weights; the roundings of `F.rms_norm`."""
    return x.mul_(x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_())


def _rotate_(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding of interleaved pairs in place; float32.

    The complex product makes the same roundings as diffusers' `apply_rotary_emb` in a fifth of its time.
    """
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(rotary)
    return x

"""Attention over a batch of requests of different lengths, and rotary positions; interfaces, and the CPU's code.

A request's queries see that request's keys only. There is neither mask nor padding: masks would take PyTorch's
scaled-dot-product attention off its fast path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.kernels.cpu_kernels import Kernels, can_rotate
from model_executor.kernels.linear import Linear, fused_linear, has_onednn, onednn_product
from model_executor.kernels.ragged import Span, pieces

SCORE_BYTES = 5 << 18
"""About the bytes of scores computed at a time. Each product rearranges its keys, so fewer and larger products are
faster, as long as the scores fit a core's cache: with 166 queries over 1,088 keys, this took 0.82 of the time of 512
KiB."""

Sizes = Sequence[tuple[int, int]]
"""(text tokens, image tokens with condition tokens) of each request in a batch."""


class Projected(NamedTuple):
    """What the projections of one kind of token give: queries, keys and values of all requests, before norm and rotary
    embedding. In one attention, kinds are text and image, in this order, or one kind alone."""

    qkv: Tensor  # [rows, 3, heads, head dim], one request after the other
    where: Sequence[Span]  # each request's rows in the matrix of rotations
    weight: Tensor | None  # of the norms of queries and keys, float32 [2, heads, head dim]; None: no norm, no rotation
    eps: float


class KeysValues:
    """Keys and values of one request in the current block. joint: [2, heads, text and image tokens, head dim], with any
    strides but a contiguous last dimension. image: the part of image tokens.

    Views are made once for all blocks: a step of few tokens spends as much time on making views as on some products.
    """

    def __init__(self, joint: Tensor, text_tokens: int) -> None:
        self.joint, self.text_tokens = joint, text_tokens
        self.image = joint[:, :, text_tokens:]

    @property
    def num_tokens(self) -> int:
        return self.joint.shape[2]

    @property
    def whole_image(self) -> Tensor | None:
        """Keys and values of all image tokens, in order, [2, heads, image tokens, head dim]; None if they are not
        together."""
        return self.image

    @cached_property
    def keys(self) -> Tensor:
        """Keys, [heads, tokens, head dim]."""
        return self.joint[0]

    @cached_property
    def value_heads(self) -> Sequence[Tensor]:
        """Values of each head, [head dim, tokens]."""
        return self.joint[1].transpose(1, 2).unbind()

    def put(self, fresh: Tensor, rows: Tensor | None) -> None:
        """Write what the block computed, [computed tokens, 2, heads, head dim], to these rows; None for all."""
        if rows is None:
            self.joint.copy_(head_major(fresh))
        else:
            self.joint.index_copy_(2, rows, head_major(fresh))


Kept = TypeVar("Kept", bound=KeysValues)


def head_major(x: Tensor) -> Tensor:
    """[tokens, n, heads, head dim] -> [n, heads, tokens, head dim], as a view."""
    return x.permute(1, 2, 0, 3)


class KeyValueSource(Protocol):
    """Supplies and takes keys and values of one request: an edit reads pages, a template being primed writes them."""

    def computed(self, number: int) -> Tensor | None:
        """The image tokens that block `number` computes, ascending, None for all. The last may be there more than once:
        then its first place counts."""

    @property
    def is_in_order(self) -> bool:
        """Whether `store` can take what a block has computed for all tokens as it is. Otherwise `load` must have put it
        into the order of the tokens."""

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        """Fill `keys_values` in block `number`: with `fresh`, [computed tokens, 2, heads, head dim], for the tokens it
        computed, and with a page for the others."""

    def store(self, page: int, image: Tensor) -> None:
        """Take the keys and values of all image tokens, [2, heads, image tokens, head dim]."""


class Attention(Protocol):
    """The attention of one forward pass, over the same tokens in every block."""

    def __call__(
        self,
        number: int,
        page: int,
        qkv: Tensor,
        where: Sequence[Span],
        sources: Sequence[KeyValueSource],
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend in block `number`, with keys and values of other tokens from `page`. qkv: [tokens, 3, heads, head dim]
        of all requests; where: each request's rows. Returns [tokens, heads * head dim], which is `out`, with contiguous
        rows, if that is given.
        """


class ProjectionAttention(ABC):
    """An attention that may also take what projections give, before norm and rotary embedding."""

    @abstractmethod
    def of_projections(
        self, number: int, page: int, parts: Sequence[Projected], rotary: Tensor, sources: Sequence[KeyValueSource]
    ) -> list[Tensor] | None:
        """As `Operators.attend`; None: it does not support these, or gains nothing by them."""


class OneByOne(Generic[Kept]):
    """Attends request by request, in one buffer that fits any of them and so stays in a core's cache."""

    def __init__(
        self,
        sizes: Sizes,
        heads: int,
        head_dim: int,
        like: Tensor,
        make: Callable[[Tensor, int], Kept],
        attend: Callable[[Tensor, Kept, Tensor], None],
        room: Tensor | None = None,
    ) -> None:
        """like: has the dtype and device to compute in. make: the class of keys and values, which `attend`, as the
        function of this name, reads. room: the buffer of another attention of the same pass with at least as many
        tokens, to share."""
        self.room = like.new_empty(2 * heads * max(map(sum, sizes)) * head_dim) if room is None else room
        self._keys_values = [
            make(self.room[: 2 * heads * sum(size) * head_dim].view(2, heads, sum(size), head_dim), size[0])
            for size in sizes
        ]
        self._attend = attend

    def __call__(
        self,
        number: int,
        page: int,
        qkv: Tensor,
        where: Sequence[Span],
        sources: Sequence[KeyValueSource],
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = qkv.new_empty(len(qkv), qkv.shape[2] * qkv.shape[3])
        for (start, stop), source, keys_values in zip(where, sources, self._keys_values, strict=True):
            source.load(number, page, keys_values, qkv[start:stop, 1:])
            if (image := keys_values.whole_image) is not None:
                source.store(page, image)
            self._attend(qkv[start:stop, 0], keys_values, out[start:stop])
        return out


def attend(query: Tensor, keys_values: KeysValues, out: Tensor, linear: Linear, kernels: Kernels | None = None) -> None:
    """Attention of one request. query: [queries, heads, head dim]. Writes to out, [queries, heads * head dim].

    With `fused_linear` or kernels, a query's bits do not depend on the number of other queries.
    """
    if kernels is not None and kernels.can_attend(query, keys_values.num_tokens):
        kernels.attend(query, keys_values.joint, out)
    elif linear is fused_linear and has_onednn(query):
        _attend_by_products(query, keys_values, out)
    else:
        key, value = keys_values.joint[None].unbind(1)
        attended = F.scaled_dot_product_attention(query.transpose(0, 1)[None], key, value)[0]
        out.copy_(attended.transpose(0, 1).flatten(1))


def _attend_by_products(query: Tensor, keys_values: KeysValues, out: Tensor) -> None:
    """Attention as two oneDNN products per head. Relative to PyTorch's scaled-dot-product attention, which multiplies
    with MKL, it took on one Zen 5 core 0.5 to 0.7 of the time from 100 queries over 1,100 keys up (float32 and
    bfloat16), 0.7 with 280 queries over 280 keys, 1.2 with 50; `torch.bmm` took 2 in float32 with many keys.
    """
    queries, heads, head_dim = query.shape
    scaled = query.new_empty(heads, queries, head_dim, dtype=torch.float32)
    scaled.copy_(query.transpose(0, 1)).mul_(head_dim**-0.5)
    step = max(2, SCORE_BYTES // (keys_values.num_tokens * scaled.element_size()))
    parts = zip(scaled.unbind(), keys_values.keys.float().unbind(), keys_values.value_heads, strict=True)
    for part, columns in zip(parts, out.split(head_dim, dim=1), strict=True):
        columns.copy_(_attend_head(*part, step))


def _attend_head(query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
    """Attention of one head. query: float32 [queries, head dim], scaled; key: float32 [keys, head dim]; value: [head
    dim, keys]; step: queries at a time, more or less: the parts are alike, since a small last one would take nearly as
    long as the others. With 166 queries over 2,112 keys, of which 155 are such a step, a mask-aware step of blocks of
    width 512 took 0.95 of the time that it took in parts of 155 and 11 (Zen 3).

    Scores are float32 even if values are bfloat16: rounded to 8 bits, a score of 20 would change its weight by 6 %.
    """
    number = max(1, round(len(query) / step))
    if number > 1:
        return torch.cat([_attend_part(part, key, value) for part in query.tensor_split(number)])
    return _attend_part(query, key, value)


def _attend_part(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax(onednn_product(query, key), dim=-1)
    return onednn_product(weights.to(value.dtype), value)


def normalise_and_rotate_(
    x: Tensor,
    rotary: Tensor,
    eps: float,
    weights: Sequence[tuple[Sequence[Span], Tensor]],
    kernels: Kernels | None = None,
) -> None:
    """Norm and rotary embedding of queries and keys, in place. Without kernels it rounds as diffusers' attention does.

    x: [tokens, n, heads, head dim]; rotary: complex64 [tokens, 1, 1, head dim / 2]; weights: pairs of tokens and the
    norm's weight for them, float32 [n, heads, head dim].
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
    """Root-mean-square norm over the last dimension in place, without weights; rounds as `F.rms_norm`."""
    return x.mul_(x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_())


def _rotate_(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding of interleaved pairs in place, float32. The complex product rounds as diffusers'
    `apply_rotary_emb` does, in a fifth of its time.
    """
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(rotary)
    return x

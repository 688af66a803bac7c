"""FLUX's transformer blocks over the sublayers of diffusers' own, for a batch whose requests compute some tokens each.

`Stream` is such a batch on its way through the blocks; a `Source` says for each of its requests where the keys and
values of the image's other tokens come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from model_executor.attention import KeysValues, attend, head_major, normalise_and_rotate_
from model_executor.kernels import Kernels
from model_executor.linear import Linear, LinearGroup, plain_linear
from model_executor.models.base import Row
from model_executor.pages import Entry, PageReader
from model_executor.ragged import Packing, Span, add_gated_, gather, norm_modulate

FLOAT16_MAX = 65504.0

MakeGroup = Callable[..., LinearGroup]
"""(*layers) -> their group."""


class Source(Protocol):
    """Where the keys and values of a request's image tokens come from, and where they go; num_tokens counts them."""

    @property
    def num_tokens(self) -> int: ...

    def load(self, number: int, image: Tensor) -> None:
        """Into `image`, [2, heads, image tokens, head dim], those that block `number` does not compute."""

    def store(self, number: int, image: Tensor) -> None:
        """What block `number` attends to in the image, complete."""

    def rows(self, number: int) -> Tensor | None:
        """Which of the request's tokens, text before image, block `number` computes; None for all."""


class Edit:
    """A request of which the blocks before `full_blocks` compute all image tokens, the others the active ones."""

    def __init__(self, row: Row, num_blocks: int, kernels: Kernels | None) -> None:
        """Raises ValueError for a row that leaves tokens out and has no pages."""
        self.num_tokens = row.latents.shape[0]
        self._active, self._full_blocks = row.active, row.full_blocks
        if row.active is None or len(row.active) == self.num_tokens:
            self._active, self._full_blocks = None, num_blocks
        elif row.pages is None and row.full_blocks < num_blocks:
            raise ValueError("a request that leaves tokens out needs the template's pages")
        else:
            text_tokens = row.prompt_embeds.shape[0]
            text = torch.arange(text_tokens, device=row.active.device)
            self._rows = torch.cat([text, row.active + text_tokens])
        self._pages: PageReader | None = None if row.pages is None else row.pages.open(kernels)

    def computed(self, number: int) -> Tensor | None:
        """The image tokens that block `number` computes, None for all."""
        return None if number < self._full_blocks else self._active

    def kept(self, number: int) -> Tensor | None:
        """Those of the request's tokens before block `number` that go on, None for all."""
        return self._rows if number == self._full_blocks > 0 and self._active is not None else None

    def rows(self, number: int) -> Tensor | None:
        return None if self.computed(number) is None else self._rows

    def load(self, number: int, image: Tensor) -> None:
        if self.computed(number) is not None:
            assert self._pages is not None
            self._pages.read(number, image)

    def store(self, number: int, image: Tensor) -> None:
        """An edit keeps nothing."""


@dataclass(frozen=True, slots=True)
class Template:
    """A template that is primed: what a block computes is its page."""

    entry: Entry
    num_tokens: int

    def load(self, number: int, image: Tensor) -> None:
        """Every token is computed."""

    def store(self, number: int, image: Tensor) -> None:
        self.entry.write(number, image)

    def rows(self, number: int) -> Tensor | None:
        return None


@dataclass(slots=True)
class Stream:
    """The tokens of a batch on their way through the blocks.

    hidden: joint matrix [tokens, hidden], changed in place. rotary: complex64 [tokens, 1, 1, head dim / 2].
    modulation: block number -> its parts, each [requests, hidden]. keys_values: of each request; they may share memory.
    """

    hidden: Tensor
    packing: Packing
    rotary: Tensor
    modulation: Callable[[int], Sequence[Tensor]]
    sources: Sequence[Source]
    keys_values: Sequence[KeysValues]
    linear: Linear
    kernels: Kernels | None

    @property
    def fused(self) -> bool:
        """Whether results may be rounded less often than diffusers does."""
        return self.linear is not plain_linear

    def keep(self, tokens: Sequence[Tensor | None]) -> None:
        """Go on with these tokens of each request, text before image, None for all."""
        if all(kept is None for kept in tokens):
            return
        packing = self.packing
        rows = [_rows_of(span, kept) for span, kept in zip(packing.joint, tokens, strict=True)]
        chosen = torch.cat(rows).to(self.hidden.device)
        lengths = [stop - start for start, stop in packing.joint_text]
        self.packing = Packing.of(lengths, [len(r) - length for r, length in zip(rows, lengths, strict=True)])
        self.hidden, self.rotary = self.hidden[chosen], self.rotary[chosen]

    def attention(self, number: int, qkv: Tensor) -> Sequence[Tensor]:
        """Every request's attention in block `number`. qkv: [tokens, 3, heads, head dim] -> parts of [tokens, hidden],
        left to right."""
        requests = zip(self.packing.joint, self.sources, self.keys_values, strict=True)
        outputs = [
            self._attend(number, qkv[start:stop], source, keys_values)
            for (start, stop), source, keys_values in requests
        ]
        return outputs[0] if len(outputs) == 1 else [torch.cat([torch.cat(list(parts), dim=1) for parts in outputs])]

    def _attend(self, number: int, qkv: Tensor, source: Source, keys_values: KeysValues) -> Sequence[Tensor]:
        source.load(number, keys_values.image)
        keys_values.put(qkv[:, 1:], source.rows(number))
        source.store(number, keys_values.image)
        return attend(qkv[:, 0], keys_values, self.linear, self.kernels)


class Modulation:
    """Shifts, scales and gates, from one product: a few rows over many weights.

    One for each block: the bits of a product may depend on its number of columns, and a pass over some blocks must
    give the bits of a pass over all.
    """

    def __init__(self, norms: Sequence[Any], scales: Sequence[int], group: MakeGroup) -> None:
        """norms: diffusers' adaptive norms that read the same conditioning; scales: which of their parts are."""
        layers = [norm.linear for norm in norms]
        self._group, self._scales = group(*layers), scales
        self.width = sum(layer.out_features for layer in layers)
        self._num_parts = self.width // layers[0].in_features

    def product(self, conditioning: Tensor) -> Tensor:
        """conditioning: [levels, hidden] -> [levels, width], of scales already 1 + scale. A level's bits depend on it
        alone."""
        product = self._group(conditioning)
        parts = self.parts(product)
        for index in self._scales:
            parts[index].add_(1)
        return product

    def parts(self, product: Tensor) -> Sequence[Tensor]:
        """[requests, width] -> parts of [requests, hidden], layer after layer."""
        parts: Sequence[Tensor] = product.chunk(self._num_parts, dim=1)
        return parts


class Block(ABC):
    """What both kinds of block have: modulation, and the image tokens' projections to queries, keys and values."""

    def __init__(self, block: Any, norms: Sequence[Any], scales: Sequence[int], group: MakeGroup) -> None:
        """norms, scales: as for `Modulation`; the image tokens' first norm leads."""
        attn = block.attn
        self.modulation = Modulation(norms, scales, group)
        self._head_dim = attn.head_dim
        self._norm_eps = norms[0].norm.eps
        self._qk_eps = attn.norm_q.eps
        self._qk_weight = _qk_weight(attn.norm_q, attn.norm_k, attn.heads)
        self._qkv = group(attn.to_q, attn.to_k, attn.to_v)

    @abstractmethod
    def run(self, stream: Stream, number: int) -> None:
        """Take the stream through this block, the `number`-th."""

    def finish(self, stream: Stream, number: int) -> None:
        """Only the keys and values of the image tokens, into the pages of the stream's templates."""
        packing = stream.packing
        shift, factor, *_ = stream.modulation(number)
        image = self._normed(stream, packing.joint_image, factor, shift)
        # Queries come along: without their columns the product would round differently.
        key_value = self._heads(self._qkv(image), 3)[:, 1:]
        rotary = gather(stream.rotary, packing.joint_image)
        normalise_and_rotate_(
            key_value[:, :1], rotary, self._qk_eps, [(packing.image, self._qk_weight[1:])], stream.kernels
        )
        for source, (start, stop) in zip(stream.sources, packing.image, strict=True):
            source.store(number, head_major(key_value[start:stop]))

    def _normed(self, stream: Stream, where: Sequence[Span], factor: Tensor, shift: Tensor) -> Tensor:
        """These rows of the stream, normed and modulated."""
        return norm_modulate(stream.hidden, where, self._norm_eps, factor, shift, fused=stream.fused)

    def _heads(self, x: Tensor, parts: int) -> Tensor:
        """[tokens, parts * hidden] -> [tokens, parts, heads, head dim]."""
        return x.view(len(x), parts, -1, self._head_dim)


class DoubleBlock(Block):
    """Text and image tokens have layers of their own and meet in attention."""

    def __init__(self, block: Any, group: MakeGroup) -> None:
        super().__init__(block, [block.norm1, block.norm1_context], [1, 4, 7, 10], group)
        attn = block.attn
        self._text_qk_weight = _qk_weight(attn.norm_added_q, attn.norm_added_k, attn.heads)
        self._text_qkv = group(attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        self._out, self._text_out = group(attn.to_out[0]), group(attn.to_add_out)
        self._up, self._down = group(block.ff.net[0].proj), group(block.ff.net[2])
        self._text_up, self._text_down = group(block.ff_context.net[0].proj), group(block.ff_context.net[2])

    def run(self, stream: Stream, number: int) -> None:
        parts, packing = stream.modulation(number), stream.packing
        (shift, factor, gate, *mlp), (text_shift, text_factor, text_gate, *text_mlp) = parts[:6], parts[6:]
        text = self._normed(stream, packing.joint_text, text_factor, text_shift)
        image = self._normed(stream, packing.joint_image, factor, shift)
        attended = _side_by_side(stream.attention(number, self._joint_qkv(stream, text, image)))
        text, image = packing.split(attended)
        self._add(stream, self._text_out(text), text_gate, self._out(image), gate)
        text = self._normed(stream, packing.joint_text, text_mlp[1], text_mlp[0])
        image = self._normed(stream, packing.joint_image, mlp[1], mlp[0])
        text = self._text_down(self._text_up(text, gelu=True))
        image = self._down(self._up(image, gelu=True))
        self._add(stream, text, text_mlp[2], image, mlp[2])

    def _joint_qkv(self, stream: Stream, text: Tensor, image: Tensor) -> Tensor:
        """Queries, keys and values after norm and rotary, [tokens, 3, heads, head dim]."""
        packing = stream.packing
        qkv = self._heads(packing.join(self._text_qkv(text), self._qkv(image)), 3)
        weights = [(packing.joint_text, self._text_qk_weight), (packing.joint_image, self._qk_weight)]
        normalise_and_rotate_(qkv[:, :2], stream.rotary, self._qk_eps, weights, stream.kernels)
        return qkv

    def _add(self, stream: Stream, text: Tensor, text_gate: Tensor, image: Tensor, gate: Tensor) -> None:
        """The outcome of both streams onto the hidden state."""
        packing, hidden = stream.packing, stream.hidden
        add_gated_(hidden, packing.joint_text, text, packing.text, text_gate)
        add_gated_(hidden, packing.joint_image, image, packing.image, gate)
        for start, stop in packing.joint_text:
            _clip_float16_(hidden[start:stop])


class SingleBlock(Block):
    """All tokens share all layers; attention and MLP read the same input."""

    def __init__(self, block: Any, group: MakeGroup) -> None:
        super().__init__(block, [block.norm], [1], group)
        self._up, self._out = group(block.proj_mlp), group(block.proj_out)

    def run(self, stream: Stream, number: int) -> None:
        shift, factor, gate = stream.modulation(number)
        joint = stream.packing.joint
        normed = self._normed(stream, joint, factor, shift)
        inner = self._up(normed, gelu=True)
        qkv = self._heads(self._qkv(normed), 3)
        normalise_and_rotate_(qkv[:, :2], stream.rotary, self._qk_eps, [(joint, self._qk_weight)], stream.kernels)
        out = self._out(_side_by_side([*stream.attention(number, qkv), inner]))
        add_gated_(stream.hidden, joint, out, joint, gate)
        _clip_float16_(stream.hidden)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _qk_weight(query_norm: Any, key_norm: Any, heads: int) -> Tensor:
    """Weights of the norms of queries and keys, float32 [2, heads, head dim]. Repeated for every head: they are a
    fourth of a pass faster to multiply with."""
    weight = torch.stack([query_norm.weight, key_norm.weight]).detach().float()
    return weight[:, None].repeat(1, heads, 1)


def _rows_of(span: Span, tokens: Tensor | None) -> Tensor:
    """Rows of the joint matrix with these tokens of a request, None for all."""
    return torch.arange(*span) if tokens is None else span[0] + tokens.cpu()


def _clip_float16_(x: Tensor) -> None:
    if x.dtype == torch.float16:
        x.clip_(-FLOAT16_MAX, FLOAT16_MAX)

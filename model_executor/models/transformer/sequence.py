"""Sequence parallelism (Ulysses): the members of a group each compute a share of every request's tokens, and attend for
a share of the heads.

All layers but attention work token by token, so they need nothing of other members. For attention the members exchange
twice: tokens with all heads become all tokens with a share of the heads, and back. What a head computes for a query
depends neither on other heads nor on other queries, and keys are put into their order before: so bits do not depend on
the number of members. Jacobs et al., DeepSpeed Ulysses, 2023; DDiT uses it for its steps (section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from model_executor.kernels import attention
from model_executor.kernels.attention import Attention, KeysValues
from model_executor.kernels.ragged import Span
from model_executor.kernels.ragged import spans as spans_of
from model_executor.models.transformer.row_sources import EditSource
from model_executor.page_cache.pages import Pages
from model_executor.parallel.group import Group, shares

Lengths = Sequence[Sequence[int]]
"""request -> the number of its tokens that each member has."""


class Shard:
    """One request's tokens on this member. A member has a share of its text tokens, one of its active image tokens, and
    one of the others, which only leading blocks compute, in this order.
    """

    def __init__(self, edit: EditSource, group: Group, device: torch.device) -> None:
        self._edit, self._me = edit, group.me
        self.num_tokens, self.text_tokens, self.fillers = edit.num_tokens, edit.text_tokens, edit.fillers
        # Members' tokens come one member after the other; as keys, they would be summed up in that order.
        self.is_in_order = not edit.makes_pages and not edit.keeps_order
        self._text = shares(edit.text_tokens, group.degree)
        active = torch.arange(edit.num_tokens, device=device) if edit.active is None else edit.active
        self._active = [active[start:stop] for start, stop in shares(len(active), group.degree)]
        self._orders: dict[tuple[bool, int], Tensor] = {}

    @cached_property
    def _every(self) -> list[Tensor]:
        """What each member computes in blocks that compute all tokens: of steps that have any."""
        if self._edit.active is None:
            return self._active
        others = _without(self._edit.active, self.num_tokens)
        share = zip(self._active, shares(len(others), len(self._active)), strict=True)
        return [torch.cat([mine, others[start:stop]]) for mine, (start, stop) in share]

    @property
    def pages(self) -> Pages | None:
        """Those of this member's heads."""
        return self._edit.pages

    @property
    def text(self) -> slice:
        """This member's text tokens."""
        return slice(*self._text[self._me])

    def lengths(self, number: int, text_tokens: int) -> list[int]:
        """Tokens that every member has in block `number`: of the image, and of the last `text_tokens` of the text."""
        pieces = zip(self._last_texts(text_tokens), self._tokens(number), strict=True)
        return [stop - start + len(tokens) for (start, stop), tokens in pieces]

    def final_lengths(self) -> list[int]:
        """Of every member, the number of image tokens that the last block computes, which are in order."""
        return [len(tokens) for tokens in self._active]

    def _tokens(self, number: int) -> Sequence[Tensor]:
        return self._every if self._edit.computed(number) is None else self._active

    def _last_texts(self, text_tokens: int) -> list[Span]:
        """Every member's share of the last `text_tokens` text tokens, counted from the first of these."""
        others = self.text_tokens - text_tokens
        return [(max(0, start - others), max(0, stop - others)) for start, stop in self._text]

    def _order(self, *, is_whole: bool, text_tokens: int) -> Tensor:
        """Where the tokens of all members, one after the other, belong, with the last `text_tokens` text tokens before
        the image. is_whole: in a block that computes all tokens. Kept for all blocks of the pass."""
        key = is_whole, text_tokens
        if key not in self._orders:
            self._orders[key] = self._order_of(self._every if is_whole else self._active, text_tokens)
        return self._orders[key]

    def _order_of(self, tokens: Sequence[Tensor], text_tokens: int) -> Tensor:
        pieces = zip(self._last_texts(text_tokens), tokens, strict=True)
        return torch.cat(
            [
                part
                for (start, stop), image in pieces
                for part in (torch.arange(start, stop, device=image.device), image + text_tokens)
            ]
        )

    # ------------------------------------------------------------------------- a source of this member's stream

    def computed(self, number: int) -> Tensor | None:
        return self._tokens(number)[self._me]

    def add_to(self, image: Tensor, number: int, added: Tensor) -> None:
        """See `EditSource.add_to`. This member's share of the active tokens comes first."""
        num_active = self.num_tokens if self._edit.active is None else len(self._edit.active)
        start, stop = shares(num_active, len(self._active))[self._me]
        mine = added[start:stop]
        image[: len(mine)].add_(mine)

    def num_conditions(self, number: int) -> int:
        conditions = self._edit.num_conditions(number)
        if not conditions:
            return 0
        start, stop = shares(self._num_shared, len(self._active))[self._me]
        return max(0, stop - max(start, self._num_shared - conditions))

    @property
    def _num_shared(self) -> int:
        """In blocks that compute all tokens, those that members share out beside the active ones: first the image's,
        then the condition tokens."""
        active = self._edit.active
        return self.num_tokens if active is None else self.num_tokens - len(active)

    def kept(self, number: int) -> Tensor | None:
        """Of this member's tokens before block `number`, those that this block still computes, None for all."""
        if self._edit.kept(number) is None:
            return None
        start, stop = self._text[self._me]
        return torch.arange(stop - start + len(self._active[self._me]), device=self._active[0].device)

    # ------------------------------------------------------------- a source of attention, for some of the heads

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        """fresh: of all members' tokens, one member after the other."""
        is_whole = self._edit.computed(number) is None
        order = self._order(is_whole=is_whole, text_tokens=keys_values.text_tokens)
        if is_whole:
            keys_values.put(fresh, order)
        else:
            self._edit.read_over(page, keys_values, fresh, order)

    def store(self, page: int, image: Tensor) -> None:
        self._edit.store(page, image)


def _without(tokens: Tensor, num_tokens: int) -> Tensor:
    """The other tokens, ascending, by a stable sort: the host would wait for a GPU to know how many `nonzero` finds."""
    is_there = torch.zeros(num_tokens, dtype=torch.uint8, device=tokens.device).index_fill_(0, tokens, 1)
    return is_there.argsort(stable=True)[: num_tokens - len(tokens)]


@dataclass(frozen=True, slots=True)
class Team:
    """A group in one pass of a model. heads: of every member."""

    group: Group
    heads: Sequence[Span]

    @property
    def num_heads(self) -> int:
        """This member's heads."""
        start, stop = self.heads[self.group.me]
        return stop - start

    def attention(self, attention: Attention, *, with_text: bool = True) -> Attention:
        """Attention of the group. attention: of this member's heads, over all tokens. with_text: all text tokens
        attend, too, not only those that fill up the image."""
        return SequenceAttention(attention, self, with_text=with_text)


class SequenceAttention:
    """Attention of a pass over a group: exchanges, attends for this member's heads, and exchanges back."""

    def __init__(self, attention: Attention, team: Team, *, with_text: bool) -> None:
        """See `Team.attention`."""
        self._attention = attention
        self._group, self._heads = team.group, team.heads
        self._with_text = with_text

    def __call__(
        self,
        number: int,
        page: int,
        qkv: Tensor,
        where: Sequence[Span],
        sources: Sequence[attention.KeyValueSource],
        out: Tensor | None = None,
    ) -> Tensor:
        """As `Attention`. qkv: of this member's tokens, all heads; sources: shards."""
        lengths = [self._lengths(source, number) for source in sources]  # request -> of every member
        every = self._in_order(self._own_heads(qkv, lengths), lengths)
        spans = spans_of(map(sum, lengths))
        attended = every.new_empty(len(every), every.shape[2] * every.shape[3])
        if every.shape[2]:
            self._attention(number, page, every, spans, sources, attended)
        return torch.cat(self._own_tokens(attended, lengths, len(qkv), qkv.shape[3]), dim=1, out=out)

    def _own_heads(self, qkv: Tensor, lengths: Lengths) -> list[Tensor]:
        """All tokens with this member's heads, as each member has sent its own: [tokens, 3, heads, head dim]."""
        start, stop = self._heads[self._group.me]
        parts = [qkv[:, :, first:last] for first, last in self._heads]
        counts = [sum(of_member) for of_member in zip(*lengths, strict=True)]
        return self._group.exchange(parts, [(count, 3, stop - start, qkv.shape[3]) for count in counts])

    def _in_order(self, received: Sequence[Tensor], lengths: Lengths) -> Tensor:
        """The same tokens, request by request."""
        of_members = zip(received, zip(*lengths, strict=True), strict=True)
        pieces = [part.split(of_member) for part, of_member in of_members]
        return torch.cat([piece for of_request in zip(*pieces, strict=True) for piece in of_request])

    def _own_tokens(self, attended: Tensor, lengths: Lengths, num_tokens: int, head_dim: int) -> list[Tensor]:
        """This member's tokens, as each member has computed its heads: [tokens, heads * head dim] of every member."""
        degree, pieces = self._group.degree, attended.split([length for of in lengths for length in of])
        parts = [torch.cat(pieces[member::degree]) for member in range(degree)]
        return self._group.exchange(parts, [(num_tokens, (stop - start) * head_dim) for start, stop in self._heads])

    def _lengths(self, source: attention.KeyValueSource, number: int) -> list[int]:
        assert isinstance(source, Shard)
        return source.lengths(number, source.text_tokens if self._with_text else source.fillers)

"""What a pass knows of its requests: which tokens each computes, and where keys and values of the others come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from model_executor.kernels import attention
from model_executor.kernels.attention import KeysValues
from model_executor.kernels.operators import Operators
from model_executor.models.base import Row
from model_executor.page_cache.pages import PageEntry, Pages, Reader


class RowSource(attention.KeyValueSource, Protocol):
    """One request in a pass. text_tokens: of its prompt, with fillers. fillers: how many of these, the last ones, fill
    up the image and take part in attention over the image alone. num_tokens: its image tokens, and the condition tokens
    that follow them. pages: what `load` reads, None if nothing."""

    @property
    def pages(self) -> Pages | None: ...

    @property
    def text(self) -> slice:
        """The text tokens that the pass computes."""

    @property
    def text_tokens(self) -> int: ...

    @property
    def fillers(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def num_conditions(self, number: int) -> int:
        """The condition tokens that the pass computes in block `number`; its last ones."""


def text_lengths(source: RowSource) -> tuple[int, int]:
    """How many text tokens of a request the pass computes, and how many of them fill up the image."""
    start, stop = source.text.start, source.text.stop
    return stop - start, stop - min(stop, max(start, source.text_tokens - source.fillers))


class EditSource:
    """A request whose leading blocks compute all image tokens, and whose other blocks compute the active ones."""

    is_in_order: ClassVar[bool] = True

    def __init__(
        self,
        row: Row,
        num_tokens: int,
        text_tokens: int,
        fillers: int,
        first_pages: Sequence[int],
        operators: Operators,
    ) -> None:
        """num_tokens, text_tokens, fillers: as in `RowSource`. first_pages: each block's first page; where it is among
        the row's `full_blocks`, the block computes all tokens. Raises ValueError for a row with active tokens but
        without pages."""
        self.num_tokens, self.text_tokens, self.fillers = num_tokens, text_tokens, fillers
        self._num_conditions = num_tokens - len(row.latents)
        self._active, self._full_blocks = row.active, sum(page in row.full_blocks for page in first_pages)
        may_repeat = row.pages is not None and row.pages.table is not None
        if row.active is None or (len(row.active) == self.num_tokens and not may_repeat):
            self._active, self._full_blocks = None, len(first_pages)
        elif row.pages is None and self._full_blocks < len(first_pages):
            raise ValueError("a request that leaves tokens out needs the template's pages")
        self.pages = row.pages
        self._operators = operators
        self.keeps_order = operators.is_invariant
        self._made = row.own.writer(operators.quantise) if row.own is not None and row.active is None else None
        self._rows: dict[int, Tensor] = {}  # text tokens before the image -> the tokens that the last block computes

    @property
    def text(self) -> slice:
        return slice(0, self.text_tokens)

    @property
    def makes_pages(self) -> bool:
        """Whether this pass makes the request's own pages."""
        return self._made is not None

    @property
    def active(self) -> Tensor | None:
        """The image tokens that the last block computes, None for all."""
        return self._active

    def _last_rows(self, text_tokens: int) -> Tensor:
        """The tokens that the last block computes, numbered with this many text tokens before the image."""
        assert self._active is not None
        if text_tokens not in self._rows:
            text = torch.arange(text_tokens, device=self._active.device)
            self._rows[text_tokens] = torch.cat([text, self._active + text_tokens])
        return self._rows[text_tokens]

    @cached_property
    def _reader(self) -> Reader:
        assert self.pages is not None
        return self._operators.open(self.pages)

    def computed(self, number: int) -> Tensor | None:
        return None if number < self._full_blocks else self._active

    def num_conditions(self, number: int) -> int:
        return self._num_conditions if self.computed(number) is None else 0

    def kept(self, number: int) -> Tensor | None:
        """The tokens, of those before block `number`, that this block still computes; None: all."""
        is_first = number == self._full_blocks > 0 and self._active is not None
        return self._last_rows(self.text_tokens) if is_first else None

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        computed = self.computed(number)
        if computed is None:
            keys_values.put(fresh, None)
        else:
            text_tokens = keys_values.text_tokens
            self.read_over(page, keys_values, fresh, self._last_rows(text_tokens) if text_tokens else computed)

    def read_over(self, page: int, keys_values: KeysValues, fresh: Tensor, rows: Tensor) -> None:
        """See `Reader.read_over`."""
        self._reader.read_over(page, keys_values, fresh, rows)

    def add_to(self, image: Tensor, number: int, added: Tensor) -> None:
        """Add to its image tokens, as they are after block `number`, in place. added: of the active ones, or all."""
        if self._active is None:
            image[: len(added)].add_(added)
        elif self.computed(number) is None:
            image.index_add_(0, self._active, added)
        else:
            image.add_(added)

    def store(self, page: int, image: Tensor) -> None:
        """Keep them as the request's own pages, if this pass makes these."""
        if self._made is not None:
            self._made.write(page, image)


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template that is being primed: what a block computes is written as its page."""

    entry: PageEntry
    text_tokens: int
    num_tokens: int
    conditions: int  # of these tokens
    fillers: int
    pages: ClassVar[Pages | None] = None
    is_in_order: ClassVar[bool] = True

    def load(self, number: int, page: int, keys_values: KeysValues, fresh: Tensor) -> None:
        keys_values.put(fresh, None)

    def store(self, page: int, image: Tensor) -> None:
        self.entry.write(page, image)

    @property
    def text(self) -> slice:
        return slice(0, self.text_tokens)

    def computed(self, number: int) -> Tensor | None:
        return None

    def num_conditions(self, number: int) -> int:
        return self.conditions

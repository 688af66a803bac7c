"""Rows of a denoising step at fixed addresses: what a CUDA graph reads at every replay.

Everything that differs between the steps of a shape is copied in before a replay: latents, prompt, noise level, the row
of the modulation table, active tokens, and the addresses and weights of the pages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_executor.models.base import Row
from model_executor.page_cache.pages import Pages, PageTable

FIELDS = ("latents", "condition", "prompt_embeds", "pooled_prompt_embeds", "sigma", "modulation", "prompt_state")
"""The tensors of a row whose contents are copied as they are."""

TABLE_NUMBERS = 3
"""int64 numbers of a page table: two addresses, then two float32 weights in one number."""


def is_of_one_request(rows: Sequence[Row]) -> bool:
    """Whether these are the rows of one request: its prompt's and, with guidance, its negative prompt's."""
    first = rows[0]
    return len(rows) <= 2 and all(row.latents is first.latents and row.active is first.active for row in rows)


def is_repeatable(row: Row) -> bool:
    """Whether a step of this row launches the same work whenever it is repeated with other contents.

    It does not while pages are on their way, for their arrival is waited for block by block, nor where other models add
    to the blocks; nor where it makes pages
    of its own, reads a share of the heads, or runs layers with adapters.
    """
    pages = row.pages
    return (
        row.streamed is None
        and not row.patches
        and not row.full_blocks
        and (row.own is None or row.active is not None)
        and (pages is None or (pages.wait is None and pages.heads is None))
    )


def key_of(rows: Sequence[Row], num_active: int | None) -> Hashable:
    """What must be equal for rows to share a graph: all shapes, and which of their tensors are the same. num_active:
    active tokens, with those repeated to fill up; None for rows without."""
    shapes = tuple(
        (row.grid, row.references, row.box, row.is_negative, _layout(row.pages), *map(_shape, _tensors(row)))
        for row in rows
    )
    numbers: dict[int, int] = {}
    shared = tuple(numbers.setdefault(id(tensor), len(numbers)) for row in rows for tensor in _tensors(row))
    pages = tuple(numbers.setdefault(id(row.pages), len(numbers)) for row in rows)
    return num_active, shapes, shared, pages


def _tensors(row: Row) -> Iterator[Tensor | None]:
    return (getattr(row, name) for name in FIELDS)


def _shape(x: Tensor | None) -> Hashable:
    return None if x is None else (tuple(x.shape), x.dtype)


def _layout(pages: Pages | None) -> Hashable:
    return None if pages is None else (pages.layout, pages.num_tokens)


@dataclass(frozen=True, slots=True)
class _Copies:
    """Contents on their way to fixed addresses; those of one device and dtype are copied by one kernel."""

    targets: list[Tensor]
    sources: list[Tensor]

    def add(self, target: Tensor, source: Tensor) -> None:
        if source.numel():
            self.targets.append(target)
            self.sources.append(source)


class StaticRows:
    """Rows of one request, with tensors of their own of the same shapes. rows: as `Denoiser.forward` takes them. The
    entries of their pages are on the meta device, since kernels find them by the page table."""

    def __init__(self, rows: Sequence[Row], num_active: int | None) -> None:
        """rows: the first whose contents are taken later; nothing of them is kept. num_active: as for `key_of`."""
        own: dict[int, Tensor] = {}
        first = rows[0]
        device = first.latents.device
        self._active = None if num_active is None else torch.empty(num_active, dtype=torch.int64, device=device)
        self._tables: list[Tensor] = []  # of each different Pages
        pages: dict[int, Pages] = {}
        for row in rows:
            for tensor in _tensors(row):
                if tensor is not None and id(tensor) not in own:
                    own[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if row.pages is not None and id(row.pages) not in pages:
                self._tables.append(torch.empty(TABLE_NUMBERS, dtype=torch.int64, device=device))
                pages[id(row.pages)] = _by_table(row.pages, self._tables[-1])
        self.rows = [self._of(row, own, pages) for row in rows]

    def _of(self, row: Row, own: Mapping[int, Tensor], pages: Mapping[int, Pages]) -> Row:
        """A row like this one. own, pages: what takes the place of its tensors and pages, by their identity."""
        tensors: dict[str, Any] = {
            name: own[id(x)] for name, x in zip(FIELDS, _tensors(row), strict=True) if x is not None
        }
        its_pages = None if row.pages is None else pages[id(row.pages)]
        return replace(row, **tensors, active=self._active, pages=its_pages, own=None)

    def take(self, rows: Sequence[Row]) -> None:
        """Copy the contents of these rows, whose key is that of the first ones; queued, without waiting."""
        copies: dict[torch.dtype, _Copies] = {}
        taken = set[int]()
        tables = iter(self._tables)
        for mine, row in zip(self.rows, rows, strict=True):
            for target, source in zip(_tensors(mine), _tensors(row), strict=True):
                if target is not None and source is not None and id(target) not in taken:
                    taken.add(id(target))
                    copies.setdefault(source.dtype, _Copies([], [])).add(target, source)
            if row.pages is not None and id(row.pages) not in taken:
                taken.add(id(row.pages))
                next(tables).copy_(_table(row.pages, pinned=row.latents.device.type == "cuda"), non_blocking=True)
        active = rows[0].active
        if self._active is not None and active is not None:
            number = len(active)
            copies.setdefault(active.dtype, _Copies([], [])).add(self._active[:number], active)
            if rest := len(self._active) - number:
                copies[active.dtype].add(self._active[number:], active[-1:].expand(rest))
        for each in copies.values():
            torch._foreach_copy_(each.targets, each.sources)


def _by_table(pages: Pages, table: Tensor) -> Pages:
    """The same pages, found by a table on the device alone."""
    near = torch.empty_like(pages.near, device="meta")
    addresses, weights = table[:2], table[2:].view(torch.float32)
    return replace(pages, near=near, far=near, table=PageTable(addresses, weights))


def _table(pages: Pages, *, pinned: bool) -> Tensor:
    """The numbers of a page table on the host, int64 [TABLE_NUMBERS]."""
    far = pages.near if pages.far is None else pages.far
    weight = 0.0 if pages.far is None else pages.weight
    table = torch.empty(TABLE_NUMBERS, dtype=torch.int64, pin_memory=pinned)
    numbers = table.numpy()
    numbers[:2] = pages.near.data_ptr(), far.data_ptr()
    numbers[2:].view(np.float32)[:] = 1.0 - weight, weight
    return table

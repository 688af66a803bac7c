"""Pages on a GPU: kernels find them by a table of addresses and weights, which they read when they run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from model_executor.kernels.attention import KeysValues
from model_executor.kernels.gpu_sizes import TILE, power_of_two
from model_executor.kernels.gpu_tables import places, upload
from model_executor.page_cache.pages import PageEntry, Pages, PageTable


class TritonReader:
    """Reads pages, interpolates them and overwrites computed tokens, all in one pass."""

    def __init__(self, pages: Pages, kernels: ModuleType) -> None:
        layout, tokens = pages.layout, pages.num_tokens
        self._pages, self._dtype, self._wait, self._kernels = pages, layout.dtype, pages.wait, kernels
        self._sizes = layout.num_rows(tokens), layout.block_bytes(tokens), layout.value_bytes(tokens)
        near = PageEntry(pages.near, layout, tokens)
        far = None if pages.far is None else PageEntry(pages.far, layout, tokens)
        self._moments = near.moments_towards(far, pages.weight)
        self._places: dict[int, Tensor] = {}  # text tokens before the image -> as `gpu_tables.places`

    @cached_property
    def _table(self) -> PageTable:
        return page_table([self._pages], self._pages.near.device)

    def read(self, block: int, out: Tensor) -> None:
        self._run(block, out, 0, None, None)

    def read_over(self, block: int, keys_values: KeysValues, fresh: Tensor, rows: Tensor) -> None:
        text_tokens = keys_values.text_tokens
        if text_tokens not in self._places:
            self._places[text_tokens] = places(rows, keys_values.num_tokens)
        self._run(block, keys_values.joint, text_tokens, fresh, self._places[text_tokens])

    def moments(self, block: int) -> Tensor:
        if self._wait is not None:
            self._wait(block)
        return self._moments(block)

    def _run(self, block: int, out: Tensor, first: int, fresh: Tensor | None, where: Tensor | None) -> None:
        if self._wait is not None:
            self._wait(block)
        kinds, heads, tokens, width = out.shape
        num_rows, block_bytes, value_bytes = self._sizes
        computed, block_width = out if fresh is None else fresh, power_of_two(width)
        together = max(1, TILE // block_width)
        table = self._table
        self._kernels.read_page[-(-tokens // together), kinds * heads](
            *(table.addresses, table.weights, computed, table.addresses if where is None else where, out),
            *(block, block_bytes, value_bytes, tokens, num_rows, first, heads),
            *(*computed.stride()[:2], *out.stride()[:3]),
            WIDTH=width,
            BLOCK=block_width,
            TOKENS=together,
            PAGE=self._dtype,
            HAS_FRESH=fresh is not None,
        )


def page_table(pages: Sequence[Pages | None], device: torch.device) -> PageTable:
    """Addresses and weights of the pages of each request, [requests, 2]: from the tables that there are, and by one
    upload for all others. Zeros for a request without pages."""
    given = [None if each is None else each.table for each in pages]
    lacking = [number for number, table in enumerate(given) if table is None]
    tables = [table for table in given if table is not None]
    if not lacking:
        return PageTable(_stacked([t.addresses for t in tables]), _stacked([t.weights for t in tables]))
    made = _uploaded([pages[number] for number in lacking], device)
    if not tables:
        return made
    places = dict(zip(lacking, zip(made.addresses, made.weights, strict=True), strict=True))
    both = [places[number] if table is None else (table.addresses, table.weights) for number, table in enumerate(given)]
    addresses, weights = zip(*both, strict=True)
    return PageTable(_stacked(addresses), _stacked(weights))


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    return rows[0][None] if len(rows) == 1 else torch.stack(list(rows))


def _uploaded(pages: Sequence[Pages | None], device: torch.device) -> PageTable:
    """Addresses and weights of these, zeros for those without pages."""
    addresses, weights = list[list[int]](), list[list[float]]()
    for each in pages:
        if each is None:
            addresses.append([0, 0])
            weights.append([0.0, 0.0])
        elif each.far is None:
            addresses.append([each.near.data_ptr()] * 2)
            weights.append([1.0, 0.0])
        else:
            addresses.append([each.near.data_ptr(), each.far.data_ptr()])
            weights.append([1.0 - each.weight, each.weight])
    parts = torch.tensor(addresses, device="cpu"), torch.tensor(weights, device="cpu")
    both = upload(torch.cat([part.view(torch.uint8).flatten() for part in parts]), device)
    of_addresses, of_weights = both.split([part.nbytes for part in parts])
    return PageTable(of_addresses.view(torch.int64).view(-1, 2), of_weights.view(torch.float32).view(-1, 2))

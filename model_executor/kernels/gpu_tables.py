"""Index tables for GPU kernels: which rows belong to which request, and where requests begin. Cached on the device, so
that they are uploaded once for all steps of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from model_executor.kernels.held import hold
from model_executor.kernels.ragged import Span

MAX_TABLES = 160
"""Tables of each kind cached on the device: six, which a step of one request needs for all its blocks, for each of the
24 shapes that become CUDA graphs, and some more. They must still be there when a step is captured."""

MAX_LARGE_TABLES = 32
"""Those with more than LARGE_ROWS rows, of 4 to 12 bytes each, as batches of many requests need them. At the default
limit of 65536 tokens all tables together take less than 100 MB."""

LARGE_ROWS = 10240
"""More than the two guided rows of a FLUX request of 1024 px have together, so that batches push out none of its."""

Spans = tuple[Span, ...]
Arguments = ParamSpec("Arguments")
Table = TypeVar("Table")


def cached(rows: Callable[Arguments, int]) -> Callable[[Callable[Arguments, Table]], Callable[Arguments, Table]]:
    """Decorates a function that makes tables, with a cache for small ones and one for large ones. rows: of the table
    for these arguments, which are given by position."""

    def decorated(make: Callable[Arguments, Table]) -> Callable[Arguments, Table]:
        small, large = lru_cache(maxsize=MAX_TABLES)(make), lru_cache(maxsize=MAX_LARGE_TABLES)(make)

        def found(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Table:
            return (large if rows(*args, **kwargs) > LARGE_ROWS else small)(*args, **kwargs)  # type: ignore[arg-type]

        return found

    return decorated


def table(where: Spans, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row numbers of these spans, one span after the other, and the request of each row, int32 [rows] each."""
    rows, requests = _table(where, device)
    return hold(rows), hold(requests)


@cached(lambda where, device: _length(where))
def _table(where: Spans, device: torch.device) -> tuple[Tensor, Tensor]:
    return upload(_rows(where), device), upload(_requests(where), device)


def offsets(where: Spans, device: torch.device) -> Tensor:
    """Starts of these spans, which lie back to back, and the end of the last one: int32 [spans + 1]."""
    return hold(_offsets(where, device))


@lru_cache(maxsize=MAX_TABLES)
def _offsets(where: Spans, device: torch.device) -> Tensor:
    starts = [start for start, _ in where] + [where[-1][1]]
    return upload(torch.tensor(starts, dtype=torch.int32, device="cpu"), device)


def rows_of(spans: Spans, device: torch.device) -> Tensor:
    """Row numbers of these spans, one span after the other: int32 [rows]."""
    return hold(_rows_of(spans, device))


@cached(lambda spans, device: _length(spans))
def _rows_of(spans: Spans, device: torch.device) -> Tensor:
    return upload(_rows(spans), device)


def norm_rows(norms: tuple[Spans, ...], sums: tuple[Spans, ...], device: torch.device) -> Tensor | None:
    """The table `rows` of the kernel `add_norm`, int32 [3, rows]. norms: the spans of one norm or two. sums: those of
    up to two additions. None if there are additions, but to other rows than are normed."""
    rows = _norm_rows(norms, sums, device)
    return None if rows is None else hold(rows)


@cached(lambda norms, sums, device: sum(map(_length, norms)))
def _norm_rows(norms: tuple[Spans, ...], sums: tuple[Spans, ...], device: torch.device) -> Tensor | None:
    rows = torch.cat([_rows(where) for where in norms])
    requests = torch.cat([_requests(where) for where in norms])
    sources = torch.zeros_like(rows)
    if sums:
        summed = torch.cat([_rows(where) for where in sums])
        order = summed.argsort()
        if not torch.equal(summed[order], rows.sort().values):
            return None
        numbers = [torch.arange(_length(where), dtype=torch.int32, device="cpu") for where in sums]
        coded = torch.cat([numbers[0], *(-1 - each for each in numbers[1:])])
        sources = coded[order][torch.searchsorted(summed[order], rows)]
    return upload(torch.stack([rows, requests, sources]), device)


class MemberRow(NamedTuple):
    """A row of the table `requests` of the kernel `attention_inputs`, which describes the members."""

    key: int
    keys: int
    text: int
    first: int
    second: int
    rotary: int
    query: int
    computed: int
    page_rows: int
    block_bytes: int
    value_bytes: int
    active: int
    num_active: int


def input_tables(requests: tuple[MemberRow, ...], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables `requests` and `tiles` of the kernel `attention_inputs`. tokens: of a tile."""
    described, tiles = _input_tables(requests, tokens, device)
    return hold(described), hold(tiles)


@lru_cache(maxsize=MAX_TABLES)
def _input_tables(requests: tuple[MemberRow, ...], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tiles = [
        (kind, number, first)
        for kind in (1, 2, 0)
        for number, request in enumerate(requests)
        for first in range(0, request.keys if kind else request.computed, tokens)
    ]
    described = torch.tensor(requests, dtype=torch.int64, device="cpu")
    return upload(described, device), upload(torch.tensor(tiles, dtype=torch.int32, device="cpu"), device)


def longest(where: Sequence[Span]) -> int:
    return max(stop - start for start, stop in where)


def places(rows: Tensor, num_tokens: int) -> Tensor:
    """For each token its index in `rows`, -1 where it is not among them: int32 [tokens]."""
    numbers = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    return torch.full([num_tokens], -1, dtype=torch.int32, device=rows.device).index_copy_(0, rows, numbers)


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, queued behind its current work, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _rows(where: Spans) -> Tensor:
    """On the host, whatever the default device is."""
    return torch.cat([torch.arange(*span, dtype=torch.int32, device="cpu") for span in where])


def _requests(where: Spans) -> Tensor:
    lengths = torch.tensor([stop - start for start, stop in where], device="cpu")
    return torch.arange(len(where), dtype=torch.int32, device="cpu").repeat_interleave(lengths)


def _length(where: Spans) -> int:
    return sum(stop - start for start, stop in where)

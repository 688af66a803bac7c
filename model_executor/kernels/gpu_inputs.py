"""Attention on a GPU over what projections give: one kernel per block prepares the queries, keys and values of all
requests of a batch, as attention reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor

from core.page_scheme import PageDtype
from model_executor.kernels.attention import KeyValueSource, Projected, ProjectionAttention, Sizes, head_major
from model_executor.kernels.gpu_attention import Attend, Together, rows_together
from model_executor.kernels.gpu_pages import page_table
from model_executor.kernels.gpu_sizes import CHUNK, TILE, power_of_two
from model_executor.kernels.gpu_tables import MemberRow, input_tables, rows_of
from model_executor.kernels.ragged import Span, spans, together
from model_executor.page_cache.pages import Pages, PageTable

SEARCHED = 1024
"""Tokens whose places one program of `find_places` finds."""


class PageSource(KeyValueSource, Protocol):
    """A source whose pages a kernel reads itself."""

    @property
    def pages(self) -> Pages | None:
        """What `load` reads, None if nothing."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of a batch lie in one kind of block. Requests that an attention function computes in one call lie
    side by side."""

    order: Sequence[int]  # of the requests
    queries: Sequence[Span]  # each request's, padded to what the attention function processes at a time
    keys: Sequence[Span]  # each request's
    requests: Tensor  # tables of the kernel `attention_inputs`
    tiles: Tensor
    places: Tensor
    parts: Sequence[Sequence[Span]]  # of each part of the output, each request's rows among the queries
    is_exact: bool  # all requests compute all tokens


class TritonTogether(Together, ProjectionAttention):
    """As `Together`, and also takes what projections give, where one kernel can prepare it."""

    def __init__(
        self,
        sizes: Sizes,
        heads: int,
        head_dim: int,
        like: Tensor,
        attend: Attend,
        kernels: ModuleType,
        beside: TritonTogether | None,
    ) -> None:
        """beside: another attention of the same pass, which has the same pages."""
        super().__init__(sizes, heads, head_dim, like, attend)
        self._kernels, self._beside = kernels, beside
        self._layouts: dict[object, Layout] = {}
        self._places: dict[
            tuple[int, ...], Tensor
        ] = {}  # numbers of active tokens and first rows -> as the kernel reads it
        self._table: PageTable | None = None
        self._queries: Tensor | None = None

    def _takes(self, number: int, parts: Sequence[Projected], rotary: Tensor, sources: Sequence[PageSource]) -> bool:
        """Whether the kernel supports these, and spares a launch or a copy: where one part has all tokens, attention
        reads them where they are."""
        if len(parts) == 1 and all(source.computed(number) is None for source in sources):
            lengths = [stop - start for start, stop in parts[0].where]
            if lengths == _padded(lengths, rows_together(self._attend)):
                return False
        has_norm = {part.weight is not None for part in parts}
        if len(has_norm) > 1 or (has_norm == {True} and not self._can_turn(rotary)):
            return False
        pages = [source.pages for source in sources if source.pages is not None]
        return len({each.layout.dtype for each in pages}) <= 1 and all(each.heads is None for each in pages)

    def _can_turn(self, rotary: Tensor) -> bool:
        head_dim = self._shape[3]
        return head_dim == power_of_two(head_dim) and rotary.is_contiguous()

    def of_projections(
        self, number: int, page: int, parts: Sequence[Projected], rotary: Tensor, sources: Sequence[KeyValueSource]
    ) -> list[Tensor] | None:
        paged = cast(Sequence[PageSource], sources)  # all that models pass are
        return self._at_once(number, page, parts, rotary, paged) if self._takes(number, parts, rotary, paged) else None

    def _at_once(
        self, number: int, page: int, parts: Sequence[Projected], rotary: Tensor, sources: Sequence[PageSource]
    ) -> list[Tensor]:
        layout = self._layout(number, parts, sources)
        for source in sources:
            if source.computed(number) is not None and source.pages is not None and source.pages.wait is not None:
                source.pages.wait(page)
        queries = self._queries_for(max(stop for _, stop in layout.queries))
        self._prepare(layout, page, parts, rotary, sources, queries)
        for (start, stop), (text, _), source in zip(layout.keys, self._sizes, sources, strict=True):
            source.store(page, head_major(self._joint[start + text : stop]))
        where, keys = ([spans[request] for request in layout.order] for spans in (layout.queries, layout.keys))
        attended = self._attend(queries, self._joint[:, 0], self._joint[:, 1], where, keys)
        return self._taken(attended, layout)

    def _prepare(
        self,
        layout: Layout,
        page: int,
        parts: Sequence[Projected],
        rotary: Tensor,
        sources: Sequence[PageSource],
        queries: Tensor,
    ) -> None:
        """Launch the kernel `attention_inputs`."""
        first, second = parts[0], parts[-1]
        _, _, heads, width = self._shape
        nothing, addresses, weights = first.qkv, layout.requests, first.qkv
        if not layout.is_exact:
            table = self.page_table(sources)
            addresses, weights = table.addresses, table.weights
        self._kernels.attention_inputs[len(layout.tiles), heads](
            *(layout.tiles, layout.requests, layout.places, first.qkv, second.qkv),
            *(nothing if part.weight is None else part.weight for part in (first, second)),
            nothing if first.weight is None else torch.view_as_real(rotary),
            *(addresses, weights, self._joint, queries, page),
            *(first.qkv.stride(0), second.qkv.stride(0), heads, first.eps),
            COLUMNS=len(MemberRow._fields),
            WIDTH=width,
            BLOCK=power_of_two(width),
            TOKENS=_tokens_of_tile(width),
            HAS_SECOND=len(parts) > 1,
            HAS_NORM=first.weight is not None,
            PAGE="" if layout.is_exact else _page_dtype(sources),
            num_warps=8,
        )

    def page_table(self, sources: Sequence[PageSource]) -> PageTable:
        """Addresses and weights of all requests' pages, [requests, 2] each."""
        if self._beside is not None:
            return self._beside.page_table(sources)
        if self._table is None:
            self._table = page_table([source.pages for source in sources], self._like.device)
        return self._table

    def _queries_for(self, number: int) -> Tensor:
        """Room for this many queries, [queries, heads, head dim]; that of the block before, if there were as many."""
        if self._queries is None or len(self._queries) != number:
            self._queries = self._like.new_empty(number, *self._shape[2:])
        return self._queries

    def _layout(self, number: int, parts: Sequence[Projected], sources: Sequence[PageSource]) -> Layout:
        computed = [source.computed(number) for source in sources]
        wheres = tuple(tuple(part.where) for part in parts)
        key = wheres, tuple(tokens is None for tokens in computed)
        if key not in self._layouts:
            self._layouts[key] = self._make_layout(wheres, computed, [source.pages for source in sources])
        return self._layouts[key]

    def _make_layout(
        self, wheres: Sequence[tuple[Span, ...]], computed: Sequence[Tensor | None], pages: Sequence[Pages | None]
    ) -> Layout:
        lengths = [sum(stop - start for start, stop in of_request) for of_request in zip(*wheres, strict=True)]
        padded = _padded(lengths, rows_together(self._attend))
        totals = [text + image for text, image in self._sizes]
        order = list(range(len(lengths)))
        if rows_together(self._attend) > 1:
            order.sort(key=lambda request: (padded[request], totals[request]))
        queries, keys = _in_order(padded, order), _in_order(totals, order)
        requests = self._requests(wheres, computed, pages, lengths, queries, keys)
        described, tiles = input_tables(requests, _tokens_of_tile(self._shape[3]), self._like.device)
        active = [tokens for tokens in computed if tokens is not None]
        key = tuple(number for request in requests for number in (request.num_active, request.key))
        if key not in self._places and active:
            self._places[key] = self._find_places(described, together(active), max(map(len, active)))
        texts = [text for text, _ in self._sizes]
        if len(wheres) == 1:
            outputs = [[(start, start + n) for (start, _), n in zip(queries, lengths, strict=True)]]
        else:
            rows = list(zip(queries, texts, lengths, strict=True))
            outputs = [
                [(start, start + text) for (start, _), text, _ in rows],
                [(start + text, start + n) for (start, _), text, n in rows],
            ]
        return Layout(order, queries, keys, described, tiles, self._places.get(key, tiles), outputs, not active)

    def _requests(
        self,
        wheres: Sequence[tuple[Span, ...]],
        computed: Sequence[Tensor | None],
        pages: Sequence[Pages | None],
        lengths: Sequence[int],
        queries: Sequence[Span],
        keys: Sequence[Span],
    ) -> tuple[MemberRow, ...]:
        """What the kernels read of each request. lengths: numbers of computed tokens."""
        starts = [[start for start, _ in spans(stop - first for first, stop in where)] for where in wheres]
        actives = [0 if tokens is None else len(tokens) for tokens in computed]
        requests = []
        for number, (each, (text, image)) in enumerate(zip(pages, self._sizes, strict=True)):
            is_whole = computed[number] is None
            layout_sizes = (0, 0, 0)
            if each is not None and not is_whole:
                tokens = each.num_tokens
                layout_sizes = (
                    each.layout.num_rows(tokens),
                    each.layout.block_bytes(tokens),
                    each.layout.value_bytes(tokens),
                )
            requests.append(
                MemberRow(
                    keys[number][0],
                    text + image,
                    text,
                    starts[0][number],
                    starts[1][number] if len(starts) > 1 else starts[0][number] + text,
                    wheres[0][number][0],
                    queries[number][0],
                    lengths[number],
                    *layout_sizes,
                    sum(actives[:number]),
                    -1 if is_whole else actives[number],
                )
            )
        return tuple(requests)

    def _find_places(self, described: Tensor, active: Tensor, most: int) -> Tensor:
        places = torch.empty(self._shape[0], dtype=torch.int32, device=self._like.device)
        keys = max(stop - start for start, stop in self._where)
        self._kernels.find_places[len(self._sizes), -(-keys // SEARCHED)](
            described, active, places, most.bit_length(), COLUMNS=len(MemberRow._fields), BLOCK=SEARCHED
        )
        return places

    def _taken(self, attended: Tensor, layout: Layout) -> list[Tensor]:
        """The rows of each part. attended: of padded queries, [queries, width]."""
        if len(self._sizes) == 1:
            return [attended[start:stop] for part in layout.parts for start, stop in part]
        wanted = tuple(span for part in layout.parts for span in part)
        lengths = [sum(stop - start for start, stop in part) for part in layout.parts]
        if layout.parts == [layout.queries] and layout.order == sorted(layout.order):
            return [attended]
        rows = rows_of(wanted, attended.device)
        out = attended.new_empty(len(rows), attended.shape[1])
        self._kernels.take_rows[len(rows), -(-out.shape[1] // CHUNK)](
            attended, rows, out, attended.stride(0), out.shape[1], BLOCK=CHUNK
        )
        return list(out.split(lengths))


def _tokens_of_tile(width: int) -> int:
    return max(1, TILE // power_of_two(width))


def _in_order(lengths: Sequence[int], order: Sequence[int]) -> list[Span]:
    """Spans of these lengths, which lie back to back in this order."""
    in_order = dict(zip(order, spans(lengths[number] for number in order), strict=True))
    return [in_order[number] for number in range(len(lengths))]


def _padded(lengths: Sequence[int], rows: int) -> list[int]:
    """Each length rounded up to a multiple of `rows`."""
    return [-(-length // rows) * rows for length in lengths]


def _page_dtype(sources: Sequence[PageSource]) -> PageDtype:
    return next(source.pages.layout.dtype for source in sources if source.pages is not None)

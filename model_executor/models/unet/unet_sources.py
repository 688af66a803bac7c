"""Where a UNet's blocks take the outputs that they do not compute, and where those of templates go: see `Source`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from math import prod
from typing import get_args

import torch
from torch import Tensor

from core.page_scheme import PageDtype, PageLayout
from model_executor.kernels.operators import Operators
from model_executor.models.base import PrimeRow, Row
from model_executor.models.boxes import Window, around, grown, inside, share, times
from model_executor.models.unet.unet_blocks import UnetBlock, pooled
from model_executor.page_cache.pages import PageEntry, Reader

GROWTH = 1
"""Tokens by which the box that convolutions compute extends beyond the active tokens' box, on every side."""

WORTH = 0.8
"""Largest share of a picture worth computing as a box; above it, convolutions of everything take no longer."""


class UnetEdit:
    """The source of a masked request: blocks compute the active tokens, or the box around them, and take the rest from
    the template's pages. A block whose first page is among the row's `full_blocks` computes all tokens. Raises
    ValueError for a row without active tokens or pages."""

    keeps = False

    def __init__(self, row: Row, operators: Operators) -> None:
        if row.pages is None or row.active is None:
            raise ValueError("a request that leaves tokens out needs the template's pages")
        self._of_template, self._operators = row.pages, operators
        self._full_blocks, self._layout = row.full_blocks, row.pages.layout
        self._grid, self._active = row.grid, row.active
        self._box = grown(around(row.active, row.grid[1]) if row.box is None else row.box, GROWTH, row.grid)
        self._is_worth = share(self._box, row.grid) <= WORTH
        self._enlarged, self._windows, self._outside = cache(self._enlarge), cache(self._window), cache(self._weigh)

    @cached_property
    def _pages(self) -> Reader:
        return self._operators.open(self._of_template)

    def leaves_out(self, block: UnetBlock) -> bool:
        """Whether a transformer block computes the active tokens alone."""
        return block.page not in self._full_blocks

    def has_box(self, block: UnetBlock) -> bool:
        """Whether a convolutional block computes a box alone."""
        return self._is_worth and block.page not in self._full_blocks

    def active(self, block: UnetBlock) -> Tensor | None:
        return self._enlarged(block.side) if self.leaves_out(block) else None

    def window(self, block: UnetBlock) -> Window | None:
        return self._windows(block.side) if self.has_box(block) else None

    def load(self, block: UnetBlock, tokens: Tensor) -> None:
        for page, part in zip(range(block.page, block.page + block.num_pages), self._parts(tokens[0]), strict=True):
            self._pages.read(page, part)
        tokens[1:] = tokens[:1]

    def moments(self, block: UnetBlock) -> Tensor:
        mean, deviation = self._pages.moments(block.page).chunk(2)
        return pooled(mean, deviation.square(), self._outside())

    def store(self, block: UnetBlock, tokens: Tensor, moments: Tensor | None = None) -> None:
        """Does nothing: an edit writes no pages."""

    def _parts(self, tokens: Tensor) -> Tensor:
        return as_pages(tokens, self._layout, prod(self._grid))

    def _enlarge(self, side: int) -> Tensor:
        """Indices of the active tokens' pixels in a map with side * side pixels per token."""
        num_columns = self._grid[1]
        row, column = self._active // num_columns, self._active % num_columns
        within = torch.arange(side, device=self._active.device)
        rows, columns = (row[:, None] * side + within), (column[:, None] * side + within)
        return (rows[:, :, None] * (num_columns * side) + columns[:, None, :]).flatten()

    def _window(self, side: int) -> Window:
        """The box in a map with side * side pixels per token."""
        rows, columns = self._grid
        return Window.on(times(self._box, side), (rows * side, columns * side), self._active.device)

    def _weigh(self) -> Tensor:
        """Equal weights for the tokens outside the box, float32 [image tokens], that sum to 1 if there are any."""
        outside = ~inside(self._box, self._grid, self._active.device).flatten()
        return outside / outside.sum().clamp(min=1)


class Whole:
    """The source of rows that compute every token."""

    keeps = False

    def active(self, block: UnetBlock) -> Tensor | None:
        return None

    def window(self, block: UnetBlock) -> Window | None:
        return None

    def load(self, block: UnetBlock, tokens: Tensor) -> None:
        raise AssertionError("every token is computed")

    def moments(self, block: UnetBlock) -> Tensor:
        raise AssertionError("every token is computed")

    def store(self, block: UnetBlock, tokens: Tensor, moments: Tensor | None = None) -> None:
        """Does nothing."""


class Templates(Whole):
    """The source of templates that are primed together: blocks compute everything, and their outputs become pages."""

    keeps = True

    def __init__(
        self, rows: Sequence[PrimeRow], layout_of: Callable[[PageDtype], PageLayout], operators: Operators
    ) -> None:
        """layout_of: the model's. The dtype of an entry's pages follows from its size. Raises ValueError for a size
        that matches none."""
        self._num_tokens = len(rows[0].latents)
        layouts = [layout_of(dtype) for dtype in get_args(PageDtype)]
        of_size = {layout.entry_bytes(self._num_tokens): layout for layout in layouts}
        size = next((row.entry.numel() for row in rows if row.entry.numel() not in of_size), None)
        if size is not None:
            raise ValueError(f"an entry of {size} bytes holds no pages of {self._num_tokens} tokens of this model")
        self._layout = of_size[rows[0].entry.numel()]
        self._entries = [
            PageEntry(row.entry, of_size[row.entry.numel()], self._num_tokens, operators.quantise) for row in rows
        ]

    def store(self, block: UnetBlock, tokens: Tensor, moments: Tensor | None = None) -> None:
        """Write the block's output to its pages, with moments beside the first page."""
        for number, (entry, of_row) in enumerate(zip(self._entries, tokens, strict=True)):
            first, *others = as_pages(of_row, self._layout, self._num_tokens)
            entry.write(block.page, first, None if moments is None else moments[number])
            for page, part in enumerate(others, block.page + 1):
                entry.write(page, part)


def as_pages(tokens: Tensor, layout: PageLayout, num_tokens: int) -> Tensor:
    """A view of a block's output, [map tokens, channels], as its pages: [pages, 2, heads, image tokens, head dim]."""
    return tokens.view(-1, 2, layout.num_heads, num_tokens, layout.head_dim)

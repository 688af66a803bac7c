"""Forward passes of diffusers' `UNet2DConditionModel`, whose convolutions want whole pictures of one size.

A request that computes every token goes through the module itself, with others of its size. One that leaves tokens out
goes alone, layer by layer (see `unet_layers.py`), and so does a template that is primed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor

from core.page_scheme import PageDtype, PageLayout
from model_executor.kernels import Kernels, best_kernels
from model_executor.models.base import PrimeRow, Row
from model_executor.models.unet_layers import TOKEN_SIDE, Block, Layers, Source, Walk
from model_executor.models.vae_family import pack, unpack
from model_executor.pages import Entry

Numbers = Sequence[int]
"""Of rows, in the order they came."""


class Unet:
    """module: the UNet. num_train_timesteps: its scheduler's. token_size: pixels per token side.

    On a CPU only the rows of one request share a pass: of another number of rows a product may be rounded otherwise,
    and a picture must not depend on what shares its batches. It costs little: a pass of four rows took 0.85 of the time
    of four passes (320 channels, 16x16 latents, one core).
    """

    def __init__(self, module: Any, num_train_timesteps: int, token_size: int) -> None:
        self.module = module.to(memory_format=torch.channels_last)  # as the VAE's convolutions, and for their reasons
        self._is_shared = module.device.type != "cpu"  # a pass, by all rows of one size
        self._num_train_timesteps = num_train_timesteps
        self._token_size = token_size
        self._layers = Layers(module)
        self._kernels = best_kernels() if module.device.type == "cpu" else None

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        """The shape of this model's pages."""
        return self._layers.page_layout(dtype)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Prediction for each row's active tokens, [active tokens, latent width]."""
        predictions: dict[int, Tensor] = {}  # row's number -> its prediction
        whole = [number for number, row in enumerate(rows) if row.active is None or len(row.active) == len(row.latents)]
        for numbers in _alike(rows, whole, _size if self._is_shared else _request):
            images = self._run([rows[number] for number in numbers]).split(1)
            predictions |= dict(zip(numbers, (pack(image, TOKEN_SIDE) for image in images), strict=True))
        return [predictions[n] if n in predictions else self._run_masked(row) for n, row in enumerate(rows)]

    def prime(self, rows: Sequence[PrimeRow], pages: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        """All image tokens of each row through the blocks whose last page is one of [start, stop), and their outputs
        into its entry. Returns each row's state for the next chunk; () after the last block."""
        return [self._prime(row, *pages) for row in rows]

    def _prime(self, row: PrimeRow, start: int, stop: int) -> tuple[Tensor, ...]:
        walk = self._start(row, Template(row, self._layers))
        if row.hidden is not None:
            walk.unpack(row.hidden)
        self._layers.run(walk, start, stop)
        return () if stop == self._layers.num_pages else walk.pack()

    def _run_masked(self, row: Row) -> Tensor:
        """Prediction for the active tokens."""
        walk = self._start(row, Edit(row, self._kernels))
        self._layers.run(walk)
        module = self.module
        prediction = module.conv_out(module.conv_act(module.conv_norm_out(walk.map)))
        return pack(prediction, TOKEN_SIDE)[row.active]

    def _start(self, row: Row | PrimeRow, source: Source) -> Walk:
        """Before the first layer, as UNet2DConditionModel.forward does it."""
        module, picture, text = self.module, self._picture(row), row.prompt_embeds[None]
        time = module.time_embedding(module.get_time_embed(picture, self._timesteps([row])))
        added = module.get_aug_embed(time, text, self._added([row]))
        return Walk(module.conv_in(picture), time if added is None else time + added, text, source)

    def _run(self, rows: Sequence[Row]) -> Tensor:
        """[rows, channels, height / 8, width / 8]. rows: of one size."""
        prediction: Tensor = self.module(
            torch.cat([self._picture(row) for row in rows]),
            self._timesteps(rows),
            encoder_hidden_states=torch.stack([row.prompt_embeds for row in rows]),
            added_cond_kwargs=self._added(rows),
            return_dict=False,
        )[0]
        return prediction

    @staticmethod
    def _picture(row: Row | PrimeRow) -> Tensor:
        """[1, channels, height / 8, width / 8]."""
        return unpack(torch.cat([row.latents, row.condition], dim=1), row.grid, TOKEN_SIDE)

    def _timesteps(self, rows: Sequence[Row | PrimeRow]) -> Tensor:
        """float32 [rows]. The noisiest keyframe lies behind the last timestep that there is."""
        levels = torch.stack([row.sigma for row in rows])
        return (levels * self._num_train_timesteps).clamp(max=self._num_train_timesteps - 1)

    def _added(self, rows: Sequence[Row | PrimeRow]) -> Mapping[str, Tensor]:
        """What SDXL sees besides: the pooled prompt; and the picture's size before it was cut, the corner where it was
        cut and the size it was cut to, which are all of the picture as it is. Others have no pooled prompt."""
        pooled = torch.stack([row.pooled_prompt_embeds for row in rows])
        sizes = [[side * self._token_size for side in row.grid] for row in rows]
        ids = [[*size, 0, 0, *size] for size in sizes]
        return {"text_embeds": pooled, "time_ids": torch.tensor(ids, dtype=pooled.dtype, device=pooled.device)}


def _size(row: Row) -> Hashable:
    """Image tokens as (rows, columns), and text tokens."""
    return row.grid, len(row.prompt_embeds)


def _request(row: Row) -> Hashable:
    """Which one a row is of: the rows of one have the same latents."""
    return _size(row), id(row.latents)


def _alike(rows: Sequence[Row], numbers: Numbers, key: Callable[[Row], Hashable]) -> Collection[Numbers]:
    """Those of these rows that have one key."""
    alike: dict[Hashable, list[int]] = {}
    for number in numbers:
        alike.setdefault(key(rows[number]), []).append(number)
    return alike.values()


class Edit:
    """A request of which leading blocks compute all tokens, the others the active ones over the template's pages. A
    block is computed in full whose first page is among the row's `full_blocks`. Raises ValueError for a row that leaves
    tokens out and has no pages."""

    def __init__(self, row: Row, kernels: Kernels | None) -> None:
        if row.pages is None or row.active is None:
            raise ValueError("a request that leaves tokens out needs the template's pages")
        self._pages, self._full_blocks, self._layout = row.pages.open(kernels), row.full_blocks, row.pages.layout
        self._num_tokens, self._columns, self._active = len(row.latents), row.grid[1], row.active
        self._enlarged = cache(self._enlarge)

    def active(self, block: Block) -> Tensor | None:
        return None if block.page < self._full_blocks else self._enlarged(block.side)

    def load(self, block: Block, tokens: Tensor) -> None:
        for page, part in zip(range(block.page, block.page + block.num_pages), self._parts(tokens), strict=True):
            self._pages.read(page, part)

    def store(self, block: Block, tokens: Tensor) -> None:
        """An edit keeps nothing."""

    def _parts(self, tokens: Tensor) -> Tensor:
        return as_pages(tokens, self._layout, self._num_tokens)

    def _enlarge(self, side: int) -> Tensor:
        """The active tokens' of a map that has side * side for each."""
        row, column, within = self._active // self._columns, self._active % self._columns, torch.arange(side)
        within = within.to(self._active.device)
        rows, columns = (row[:, None] * side + within), (column[:, None] * side + within)
        return (rows[:, :, None] * (self._columns * side) + columns[:, None, :]).flatten()


class Template:
    """A template that is primed: what blocks give is kept."""

    def __init__(self, row: PrimeRow, layers: Layers) -> None:
        """The entry's size tells the dtype of its pages. Raises ValueError for one that is none's."""
        self._num_tokens, size = len(row.latents), row.entry.numel()
        layouts = [layers.page_layout(dtype) for dtype in get_args(PageDtype)]
        fitting = [layout for layout in layouts if layout.entry_bytes(self._num_tokens) == size]
        if not fitting:
            raise ValueError(f"an entry of {size} bytes holds no pages of {self._num_tokens} tokens of this model")
        self._layout = fitting[0]
        self._entry = Entry(row.entry, self._layout, self._num_tokens)

    def active(self, block: Block) -> Tensor | None:
        return None

    def load(self, block: Block, tokens: Tensor) -> None:
        """Every token is computed."""

    def store(self, block: Block, tokens: Tensor) -> None:
        for number, part in enumerate(as_pages(tokens, self._layout, self._num_tokens)):
            self._entry.write(block.page + number, part)


def as_pages(tokens: Tensor, layout: PageLayout, num_tokens: int) -> Tensor:
    """A view of a block's output, [map tokens, channels], as its pages: [pages, 2, heads, image tokens, head dim]."""
    return tokens.view(-1, 2, layout.num_heads, num_tokens, layout.head_dim)

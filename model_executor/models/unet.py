"""The forward pass of UNet denoisers, over diffusers' `UNet2DConditionModel`.

Convolutions need whole pictures, so only pictures of one size can share a pass. Rows that compute every token go
through the diffusers module itself. Rows with active tokens, and templates that are primed, go layer by layer (see
`unet_layers.py` and `unet_blocks.py`). What shares a pass: on a GPU, whole rows of one size, templates of one size, and
the rows of one masked request, each with the same adapters; on a CPU, only the whole rows of one request; on a GPU with
`--batch-invariant` no rows, since ranks may share out the rows of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from core.model_info import BlockRun
from core.page_scheme import PageDtype, PageLayout
from model_executor.kernels.cpu_layers import use_onednn
from model_executor.kernels.operators import Operators, best_operators
from model_executor.models.base import PrimeRow, Row
from model_executor.models.boxes import Window, around, grown, inside, share, times
from model_executor.models.unet_blocks import Block, Source, Walk, pooled
from model_executor.models.unet_layers import TOKEN_SIDE, Layers
from model_executor.models.vae_family import pack, unpack
from model_executor.page_cache.pages import Entry
from model_executor.patches.module_patches import ModulePatches

CACHED_GRIDS = 32
"""Picture sizes whose `time_ids` are cached."""

GROWTH = 1
"""Tokens by which the box that convolutions compute extends beyond the active tokens' box, on every side."""

WORTH = 0.8
"""Largest share of a picture worth computing as a box; above it, convolutions of everything take no longer."""

AnyRow = TypeVar("AnyRow", Row, PrimeRow)

Numbers = Sequence[int]
"""Indices of rows in a batch, ascending."""


class Arranged(NamedTuple):
    """A UNet, with certain adapters or none, and its layers in the order they run, compiled where operators do."""

    module: Any
    layers: Layers


class Unet:
    """Runs a UNet on batches of rows.

    module: the UNet. num_train_timesteps: its scheduler's. token_size: pixels per token side. operators: what reads and
    makes pages, None for the fastest on the device.

    On a CPU only the rows of one request share a pass: a product's rounding may depend on its number of rows, and a
    picture must not depend on the other requests in its batch. This costs little: a pass of four rows took 0.85 of the
    time of four passes (320 channels, 16x16 latents, one core).
    """

    def __init__(
        self, module: Any, num_train_timesteps: int, token_size: int, operators: Operators | None = None
    ) -> None:
        convolutions: list[Any] = [layer for layer in module.modules() if isinstance(layer, torch.nn.Conv2d)]
        for convolution in convolutions:  # faster, as in `vae.ImageVae`; quantised layers stay
            convolution.to(memory_format=torch.channels_last)
        self.module = module
        self._operators = operators or best_operators(module.device)
        # Whether all rows of one size share a pass; with `--batch-invariant` no two rows do.
        self._is_shared = module.device.type != "cpu" and not self._operators.is_invariant
        if module.device.type == "cpu":
            use_onednn(module)
        self._num_train_timesteps = num_train_timesteps
        self._token_size = token_size
        self._ids = lru_cache(maxsize=CACHED_GRIDS)(self._make_ids)
        self.patches = ModulePatches(module, module.device, module.dtype, self._arrange)

    def _arrange(self, module: Any) -> Arranged:
        blocks = (m for m in module.modules() if isinstance(m, ResnetBlock2D | BasicTransformerBlock))
        self._operators.compile_(blocks)
        return Arranged(module, Layers(module, self._operators.compiled))

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        """The shape of this model's pages."""
        return self.patches.plain.layers.page_layout(dtype)

    def block_runs(self, num_tokens: int) -> tuple[BlockRun, ...]:
        """The shares of compute of this model's blocks, for a picture of `num_tokens`."""
        return self.patches.plain.layers.block_runs(num_tokens)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Prediction for each row's active tokens, [active tokens, latent width]."""
        predictions: dict[int, Tensor] = {}  # row's number -> its prediction
        whole = [number for number, row in enumerate(rows) if row.active is None or len(row.active) == len(row.latents)]
        masked = [number for number in range(len(rows)) if number not in whole]
        alone = id if self._operators.is_invariant else _request  # other ranks may have the other rows of a request
        for numbers in _alike(rows, whole, _size if self._is_shared else alone):
            predictions |= dict(zip(numbers, self._run([rows[number] for number in numbers]), strict=True))
        for numbers in _alike(rows, masked, _edit if self._is_shared else id):
            predictions |= dict(zip(numbers, self._run_masked([rows[number] for number in numbers]), strict=True))
        return [predictions[number] for number in range(len(rows))]

    def prime(self, rows: Sequence[PrimeRow], pages: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        """Run all image tokens of each row through the blocks whose last page is in [start, stop), and write their
        outputs into the row's entry. Returns each row's state for the next chunk; () after the last block."""
        hidden: dict[int, tuple[Tensor, ...]] = {}  # row's number -> what its next chunk starts from
        for numbers in _alike(rows, range(len(rows)), _size if self._is_shared else id):
            hidden |= dict(zip(numbers, self._prime([rows[number] for number in numbers], *pages), strict=True))
        return [hidden[number] for number in range(len(rows))]

    def _prime(self, rows: Sequence[PrimeRow], start: int, stop: int) -> Sequence[tuple[Tensor, ...]]:
        """rows: of one size, with the same patches, before the same chunk."""
        module, layers = self.patches.under(rows[0].patches)
        walk = self._start(module, rows, Templates(rows, layers, self._operators))
        if before := [row.hidden for row in rows if row.hidden is not None]:
            walk.unpack([torch.cat(parts) for parts in zip(*before, strict=True)])
        layers.run(walk, start, stop)
        if stop == layers.num_pages:
            return [()] * len(rows)
        return list(zip(*(part.split(1) for part in walk.pack()), strict=True))

    def _run_masked(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Predictions for the active tokens of each row. rows: of one request."""
        module, layers = self.patches.under(rows[0].patches)
        walk = self._start(module, rows, Edit(rows[0], self._operators))
        layers.run(walk)
        prediction = module.conv_out(module.conv_act(module.conv_norm_out(walk.map)))
        return [pack(image, TOKEN_SIDE)[rows[0].active] for image in prediction.split(1)]

    def _start(self, module: Any, rows: Sequence[Row | PrimeRow], source: Source) -> Walk:
        """The state before the first layer, as in UNet2DConditionModel.forward. module: with the patches of the rows,
        which are of one size."""
        pictures, text = self._pictures(rows), _texts(rows)
        time = module.time_embedding(module.get_time_embed(pictures, self._timesteps(rows)))
        added = module.get_aug_embed(time, text, self._added(rows))
        return Walk(module.conv_in(pictures), time if added is None else time + added, text, source)

    def _run(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Predictions for all tokens of each row. rows: of one size, with the same patches."""
        prediction: Tensor = self.patches.under(rows[0].patches).module(
            self._pictures(rows),
            self._timesteps(rows),
            encoder_hidden_states=_texts(rows),
            added_cond_kwargs=self._added(rows),
            return_dict=False,
        )[0]
        return [pack(image, TOKEN_SIDE) for image in prediction.split(1)]

    @staticmethod
    def _pictures(rows: Sequence[Row | PrimeRow]) -> Tensor:
        """The UNet's input: latents and condition, [rows, channels, height / 8, width / 8]."""
        images = (torch.cat([row.latents, row.condition], dim=1) for row in rows)
        return torch.cat([unpack(image, row.grid, TOKEN_SIDE) for image, row in zip(images, rows, strict=True)])

    def _timesteps(self, rows: Sequence[Row | PrimeRow]) -> Tensor:
        """Timestep of each row, float32 [rows], clamped: the noisiest keyframe lies beyond the last timestep."""
        levels = torch.stack([row.sigma for row in rows])
        return (levels * self._num_train_timesteps).clamp(max=self._num_train_timesteps - 1)

    def _added(self, rows: Sequence[Row | PrimeRow]) -> Mapping[str, Tensor]:
        """SDXL's additional inputs: the pooled prompt, and `time_ids`: original size, crop corner and target size, here
        those of an uncropped picture. Other UNets ignore them."""
        pooled = torch.stack([row.pooled_prompt_embeds for row in rows])
        return {"text_embeds": pooled, "time_ids": torch.stack([self._ids(row.grid) for row in rows]).to(pooled.dtype)}

    def _make_ids(self, grid: tuple[int, int]) -> Tensor:
        """SDXL's time_ids for a picture size, made once on the device: copying them there would wait for a GPU."""
        size = [side * self._token_size for side in grid]
        return torch.tensor([*size, 0, 0, *size], device=self.module.device)


def _texts(rows: Sequence[Row | PrimeRow]) -> Tensor:
    """Prompt embeddings, [rows, text tokens, width]."""
    return torch.stack([row.prompt_embeds for row in rows])


def _size(row: Row | PrimeRow) -> Hashable:
    """Key of rows of one size, image tokens as (rows, columns) and number of text tokens, and with the same patches:
    convolutions compute all pictures of a pass alike."""
    return row.grid, len(row.prompt_embeds), row.patches


def _request(row: Row) -> Hashable:
    """Key of the rows of one request: they have the same latents tensor."""
    return _size(row), id(row.latents)


def _edit(row: Row) -> Hashable:
    """Key of the rows of one masked request: they also have the same active tokens and pages."""
    return _request(row), id(row.active), id(row.pages)


def _alike(rows: Sequence[AnyRow], numbers: Numbers, key: Callable[[AnyRow], Hashable]) -> Collection[Numbers]:
    """Groups these rows by key."""
    alike: dict[Hashable, list[int]] = {}
    for number in numbers:
        alike.setdefault(key(rows[number]), []).append(number)
    return alike.values()


class Edit:
    """The source of a masked request: blocks compute the active tokens, or the box around them, and take the rest from
    the template's pages. A block whose first page is among the row's `full_blocks` computes all tokens. Raises
    ValueError for a row without active tokens or pages."""

    keeps = False

    def __init__(self, row: Row, operators: Operators) -> None:
        if row.pages is None or row.active is None:
            raise ValueError("a request that leaves tokens out needs the template's pages")
        self._pages, self._full_blocks, self._layout = operators.open(row.pages), row.full_blocks, row.pages.layout
        self._grid, self._active = row.grid, row.active
        self._box = grown(around(row.active, row.grid[1]) if row.box is None else row.box, GROWTH, row.grid)
        self._is_worth = share(self._box, row.grid) <= WORTH
        self._enlarged, self._windows, self._outside = cache(self._enlarge), cache(self._window), cache(self._weigh)

    def active(self, block: Block) -> Tensor | None:
        return None if block.page in self._full_blocks else self._enlarged(block.side)

    def window(self, block: Block) -> Window | None:
        return self._windows(block.side) if self._is_worth and block.page not in self._full_blocks else None

    def load(self, block: Block, tokens: Tensor) -> None:
        for page, part in zip(range(block.page, block.page + block.num_pages), self._parts(tokens[0]), strict=True):
            self._pages.read(page, part)
        tokens[1:] = tokens[:1]

    def moments(self, block: Block) -> Tensor:
        mean, deviation = self._pages.moments(block.page).chunk(2)
        return pooled(mean, deviation.square(), self._outside())

    def store(self, block: Block, tokens: Tensor, moments: Tensor | None = None) -> None:
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


class Templates:
    """The source of templates that are primed together: blocks compute everything, and their outputs become pages."""

    keeps = True

    def __init__(self, rows: Sequence[PrimeRow], layers: Layers, operators: Operators) -> None:
        """The dtype of an entry's pages follows from its size. Raises ValueError for a size that matches none."""
        self._num_tokens = len(rows[0].latents)
        layouts = [layers.page_layout(dtype) for dtype in get_args(PageDtype)]
        of_size = {layout.entry_bytes(self._num_tokens): layout for layout in layouts}
        size = next((row.entry.numel() for row in rows if row.entry.numel() not in of_size), None)
        if size is not None:
            raise ValueError(f"an entry of {size} bytes holds no pages of {self._num_tokens} tokens of this model")
        self._layout = of_size[rows[0].entry.numel()]
        self._entries = [
            Entry(row.entry, of_size[row.entry.numel()], self._num_tokens, operators.quantise) for row in rows
        ]

    def active(self, block: Block) -> Tensor | None:
        return None

    def window(self, block: Block) -> Window | None:
        return None

    def load(self, block: Block, tokens: Tensor) -> None:
        raise AssertionError("every token is computed")

    def moments(self, block: Block) -> Tensor:
        raise AssertionError("every token is computed")

    def store(self, block: Block, tokens: Tensor, moments: Tensor | None = None) -> None:
        """Write the block's output to its pages, with moments beside the first page."""
        for number, (entry, of_row) in enumerate(zip(self._entries, tokens, strict=True)):
            first, *others = as_pages(of_row, self._layout, self._num_tokens)
            entry.write(block.page, first, None if moments is None else moments[number])
            for page, part in enumerate(others, block.page + 1):
                entry.write(page, part)


def as_pages(tokens: Tensor, layout: PageLayout, num_tokens: int) -> Tensor:
    """A view of a block's output, [map tokens, channels], as its pages: [pages, 2, heads, image tokens, head dim]."""
    return tokens.view(-1, 2, layout.num_heads, num_tokens, layout.head_dim)

"""A denoiser of transformer blocks, block by block, over the sublayers of diffusers' own module.

What differs from the module's own forward is the batch: rows of many requests in one matrix (see `ragged.py`),
modulation computed per request, attention per request. And a request computes its active tokens alone; their queries
also see the keys and values of the template's other tokens, read from its pages. What becomes of text, picture and
noise level before the first block is each model's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, ClassVar, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.page_scheme import PageDtype, PageLayout
from model_executor.kernels.attention import Attention
from model_executor.kernels.linear import PACKED_BYTES, Group, LinearGroup, as_linear
from model_executor.kernels.operators import Operators, best_operators
from model_executor.kernels.ragged import Packing
from model_executor.models.base import PrimeRow, Row
from model_executor.models.blocks import Block, Edit, Modulation, Source, Stream, Template
from model_executor.page_cache.pages import Entry
from model_executor.patches.adapters import Adapter, FittedAdapter

CACHED_GRIDS = 32
"""Tables of positions kept, one per image size and text length; FLUX's is 8 bytes * tokens * head dim / 2."""

MODULATION_BYTES = 64 * 1024**2
"""Most of a request's modulation at all its noise levels, all its rows together: 1.2 MB a row for the embedded model at
28 steps."""


class Denoiser(ABC):
    """A ragged forward pass. `module` is a diffusers transformer; `num_train_timesteps` is its scheduler's.

    rows_per_token: as in `PageLayout`; with 2, a row's condition tokens stand behind its image tokens, and only blocks
    that compute all tokens compute them.

    operators: what it computes with, None for the fastest that the device has. Weights must be in place, and the number
    of threads set, when it is made (see `LinearGroup`). owns_module: nobody else runs it, so that no weight has to be
    held twice.
    """

    rows_per_token: ClassVar[int] = 1

    def __init__(
        self, module: Any, num_train_timesteps: int, operators: Operators | None = None, *, owns_module: bool = False
    ) -> None:
        self.module = module
        self._device: torch.device = module.device
        self._owns_module = owns_module
        self.dtype: torch.dtype = module.dtype  # diffusers looks through all modules for it, 0.6 ms each time
        self._num_train_timesteps = num_train_timesteps
        self._operators = operators or best_operators(self._device)
        self._pack = sum(parameter.nbytes for parameter in module.parameters()) <= PACKED_BYTES
        self._groups: dict[tuple[nn.Module, ...], LinearGroup] = {}  # layers -> their group without an adapter
        self._adapter: FittedAdapter | None = None
        self._build()
        if owns_module and self._pack:
            _unmap(module)
        self._rotary_table = lru_cache(maxsize=CACHED_GRIDS)(self._make_rotary_table)

    def _build(self) -> None:
        """All that reads the adapter."""
        embed = self.module.time_text_embed
        self._time_text_embed = embed if self._adapter is None else self._adapter.merge(embed)
        self._blocks = self._make_blocks()
        self.num_pages = 0
        for block in self._blocks:
            block.page = self.num_pages
            self.num_pages += block.num_pages
        self._first_pages = [block.page for block in self._blocks]
        self._modulations = [block.modulation for block in self._blocks]
        self._modulations.append(Modulation([self.module.norm_out], [0], self._group))
        self._image_out = self._group(self.module.proj_out)

    def adapted(self, adapter: Adapter) -> Self:
        """This denoiser with an adapter; they share all weights. Raises ConfigError where it does not fit."""
        twin = copy(self)
        twin._adapter = fitted = FittedAdapter(adapter, self.module, self._device, self.dtype)
        twin._build()
        fitted.check()
        twin._adapter = None  # what was read of it: the groups have their own
        return twin

    def computing_with(self, operators: Operators) -> Self:
        """This denoiser with other operators over the same layers, which are run as they were."""
        twin = copy(self)
        twin._operators = operators
        return twin

    # ------------------------------------------------------------------------------------------- each model's own

    @staticmethod
    @abstractmethod
    def _count_pages(config: Mapping[str, Any]) -> int:
        """Attentions over the picture's tokens."""

    @abstractmethod
    def _make_blocks(self) -> list[Block]:
        """In the order they run; called when groups can be made."""

    @abstractmethod
    def _embed(self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing) -> Tensor:
        """Text and image tokens of all rows, [tokens, hidden]. computed: the image tokens of each, None for all, and
        for the condition tokens too."""

    @abstractmethod
    def _embedding(self, sigma: Tensor, pooled_prompt_embeds: Tensor, guidance_scale: float) -> Tensor:
        """What modulation is computed from, of one request, [1, hidden].

        One request at a time: a product's rounding may depend on its number of rows when these are few.
        """

    @abstractmethod
    def _make_rotary_table(self, text_tokens: int, grid: tuple[int, int]) -> Tensor:
        """Rotations of text and of every token of an image, row by row, and of its condition tokens likewise: complex64
        [tokens, 1, 1, head dim / 2]."""

    # ------------------------------------------------------------------------------------------------------- pages

    @classmethod
    def layout_of(cls, config: Mapping[str, Any], dtype: PageDtype) -> PageLayout:
        """The shape of the pages of a model of this configuration: keys and values of all its attentions."""
        return PageLayout(
            num_blocks=cls._count_pages(config),
            num_heads=config["num_attention_heads"],
            head_dim=config["attention_head_dim"],
            dtype=dtype,
            rows_per_token=cls.rows_per_token,
        )

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        """The shape of this model's pages."""
        return self.layout_of(self.module.config, dtype)

    def _group(self, *layers: nn.Module) -> Group:
        """Their group, with what the adapter adds to them."""
        if layers not in self._groups:
            self._groups[layers] = self._make_group(*map(as_linear, layers), owns_layers=self._owns_module)
        group = self._groups[layers]
        return group if self._adapter is None else self._adapter.extend(group, layers, self._make_group)

    def _make_group(self, *layers: nn.Module, owns_layers: bool = True) -> LinearGroup:
        operators = self._operators
        return LinearGroup(layers, operators.linear, self._pack, operators.kernels, owns_layers=owns_layers)

    # ------------------------------------------------------------------------------------------------------- passes

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Velocity of each row's active tokens, [active tokens, latent width].

        Raises ValueError for a row that leaves tokens out and has no pages.
        """
        edits = [Edit(row, self._num_tokens(row), self._first_pages, self._operators) for row in rows]
        stream = self._start(rows, edits, [edit.computed(0) for edit in edits])
        for number, block in enumerate(self._blocks):
            stream.keep([edit.kept(number) for edit in edits])
            block.run(stream, number)
        stream.keep([edit.kept(len(self._blocks)) for edit in edits])
        velocity = self._project_out(stream)
        spans = zip(rows, stream.packing.image, strict=True)
        return [velocity[start:stop][: len(row.latents)] for row, (start, stop) in spans]

    def prime(self, rows: Sequence[PrimeRow], pages: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        """All image tokens of each row through the blocks whose last page is one of [start, stop), and their pages into
        its entry.

        Returns each row's hidden state for the next chunk, [text and image tokens, hidden]; () after the last block, of
        which only keys and values are computed. A row's bits depend neither on the other rows nor on the chunks.
        """
        templates = [Template(self._entry(row), self._num_tokens(row)) for row in rows]
        stream = self._start(rows, templates, [None] * len(rows))
        for number, block in enumerate(self._blocks):
            if pages[0] <= block.page + block.num_pages - 1 < pages[1]:
                if number == len(self._blocks) - 1:
                    block.finish(stream, number)
                    return [()] * len(rows)
                block.run(stream, number)
        return [(stream.hidden[start:stop].clone(),) for start, stop in stream.packing.joint]

    def modulation(
        self, pooled_prompt_embeds: Tensor, guidance_scale: float, sigmas: Tensor, num_rows: int
    ) -> Tensor | None:
        """What `Row.modulation` may hold at each of these noise levels, [levels, width]: all blocks' shifts, scales and
        gates, with the bits that every step would compute. None where so many tables, one for each of the request's
        rows, are more than MODULATION_BYTES.
        """
        width = sum(part.width for part in self._modulations)
        if num_rows * len(sigmas) * width * self.dtype.itemsize > MODULATION_BYTES:
            return None
        embeddings = [self._embedding(sigma, pooled_prompt_embeds, guidance_scale) for sigma in sigmas]
        conditioning = F.silu(torch.cat(embeddings))
        return torch.cat([part.product(conditioning) for part in self._modulations], dim=1)

    # ------------------------------------------------------------------------------------------------------- inputs

    def _start(
        self, rows: Sequence[Row | PrimeRow], sources: Sequence[Source], computed: Sequence[Tensor | None]
    ) -> Stream:
        """The stream before its first block; computed: the image tokens of each row that are in it, None for all."""
        packing = Packing.of(
            [row.prompt_embeds.shape[0] for row in rows],
            [
                self._num_tokens(row) if tokens is None else len(tokens)
                for row, tokens in zip(rows, computed, strict=True)
            ],
        )
        hidden = [row.hidden[0] for row in rows if isinstance(row, PrimeRow) and row.hidden is not None]
        rotary = torch.cat([self._rotary(row, source.rows(0)) for row, source in zip(rows, sources, strict=True)])
        joint = torch.cat(hidden) if hidden else self._embed(rows, computed, packing)
        modulation = self._modulation_of(rows)
        return Stream(joint, packing, rotary, modulation, sources, *self._attentions(rows, joint), self._operators)

    def _attentions(self, rows: Sequence[Row | PrimeRow], like: Tensor) -> tuple[Attention, Attention | None]:
        """Of text and image together, and where a block asks for it, of the image alone; dtype and device of `like`."""
        heads, head_dim = self.module.config.num_attention_heads, self.module.config.attention_head_dim
        sizes = [(row.prompt_embeds.shape[0], self._num_tokens(row)) for row in rows]
        joint = self._operators.attention(sizes, heads, head_dim, like)
        if self.num_pages == len(self._blocks):
            return joint, None
        return joint, self._operators.attention([(0, image) for _, image in sizes], heads, head_dim, like, joint)

    def _modulation_of(self, rows: Sequence[Row | PrimeRow]) -> Callable[[int], Sequence[Tensor]]:
        """Block number -> its shifts, scales and gates, each [requests, hidden]; after the last one the output's."""
        known = [row.modulation for row in rows if isinstance(row, Row) and row.modulation is not None]
        if len(known) == len(rows):
            tables = torch.cat(known).split([part.width for part in self._modulations], dim=1)
            return lambda number: self._modulations[number].parts(tables[number])
        embeddings = [self._embedding(row.sigma, row.pooled_prompt_embeds, row.guidance_scale) for row in rows]
        conditioning = F.silu(torch.cat(embeddings))
        return lambda number: self._modulations[number].parts(self._modulations[number].product(conditioning))

    def _num_tokens(self, row: Row | PrimeRow) -> int:
        """Image and condition tokens."""
        return self.rows_per_token * len(row.latents)

    def _rotary(self, row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
        """Rotations of these of a request's tokens, complex64 [tokens, 1, 1, head dim / 2]."""
        return select(self._rotary_table(row.prompt_embeds.shape[0], row.grid), tokens)

    def _entry(self, row: PrimeRow) -> Entry:
        """The entry to write; its size tells the dtype of its pages."""
        num_tokens, size = len(row.latents), row.entry.numel()
        for layout in map(self.page_layout, get_args(PageDtype)):
            if layout.entry_bytes(num_tokens) == size:
                return Entry(row.entry, layout, num_tokens, self._operators.quantise)
        raise ValueError(f"an entry of {size} bytes holds no pages of {num_tokens} tokens of this model")

    # ------------------------------------------------------------------------------------------------------- output

    def _project_out(self, stream: Stream) -> Tensor:
        """Velocity of all image tokens, [tokens, latent width]."""
        factor, shift = stream.modulation(len(self._blocks))
        where, eps = stream.packing.joint_image, self.module.norm_out.norm.eps
        return self._image_out(self._operators.norm_modulate(stream.hidden, where, eps, factor, shift))


def _unmap(module: nn.Module) -> None:
    """Copy the few parameters left, or they would keep all of the checkpoint's file mapped, which counts as memory."""
    for parameter in module.parameters():
        if not parameter.is_meta and type(parameter) is nn.Parameter:  # quantised ones never were in the file
            parameter.data = parameter.data.clone()


def select(x: Tensor, tokens: Tensor | None) -> Tensor:
    """These rows of x, None for all."""
    return x if tokens is None else x[tokens]

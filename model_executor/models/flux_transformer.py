"""FLUX's denoiser, block by block, over the sublayers of a diffusers `FluxTransformer2DModel`.

Follows `diffusers/models/transformers/transformer_flux.py`: with `plain_linear`, one request and every token active,
the result is bit-identical to the module's own forward. What differs is the batch: rows of many requests in one matrix
(see `ragged.py`), modulation computed per request, attention per request. And a request computes its active tokens
alone; their queries also see the keys and values of the template's other tokens, read from its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.page_scheme import PageDtype, PageLayout
from model_executor.attention import KeysValues
from model_executor.kernels import best_kernels
from model_executor.linear import PACKED_BYTES, Linear, LinearGroup, best_linear
from model_executor.models.base import PrimeRow, Row
from model_executor.models.flux_blocks import (
    Block,
    DoubleBlock,
    Edit,
    Modulation,
    SingleBlock,
    Source,
    Stream,
    Template,
)
from model_executor.pages import Entry
from model_executor.ragged import Packing, norm_modulate

CACHED_GRIDS = 32
"""Rotary tables kept, one per image size and text length; a table is 8 bytes * tokens * head dim / 2."""

MODULATION_BYTES = 64 * 1024**2
"""Largest table of a request's modulation at all its noise levels: 1.2 MB for the embedded model at 28 steps."""


class FluxTransformer:
    """A ragged forward pass. `module` is a diffusers FluxTransformer2DModel; `num_train_timesteps` is its scheduler's.

    linear: how layers run; None for the fastest that this process has, on one thread with compiled kernels. Weights and
    adapters must be in place, and the number of threads set, when it is made (see `LinearGroup`).
    """

    def __init__(self, module: Any, num_train_timesteps: int, linear: Linear | None = None) -> None:
        self.module = module
        self.dtype: torch.dtype = module.dtype  # diffusers looks through all modules for it, 0.6 ms each time
        self._num_train_timesteps = num_train_timesteps
        self._linear = linear or best_linear()
        self._kernels = best_kernels() if linear is None and module.device.type == "cpu" else None
        self._pack = sum(parameter.nbytes for parameter in module.parameters()) <= PACKED_BYTES
        self._image_in, self._text_in = self._group(module.x_embedder), self._group(module.context_embedder)
        self._blocks: list[Block] = [DoubleBlock(block, self._group) for block in module.transformer_blocks]
        self._blocks += [SingleBlock(block, self._group) for block in module.single_transformer_blocks]
        self._modulations = [block.modulation for block in self._blocks]
        self._modulations.append(Modulation([module.norm_out], [0], self._group))
        self._image_out = self._group(module.proj_out)
        self._rotary_table = lru_cache(maxsize=CACHED_GRIDS)(self._make_rotary_table)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        """The shape of this model's pages."""
        heads, head_dim = self.module.config.num_attention_heads, self.module.config.attention_head_dim
        return PageLayout(num_blocks=self.num_blocks, num_heads=heads, head_dim=head_dim, dtype=dtype)

    def _group(self, *layers: nn.Module) -> LinearGroup:
        return LinearGroup(layers, self._linear, self._pack, self._kernels)

    # ------------------------------------------------------------------------------------------------------- passes

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Velocity of each row's active tokens, [active tokens, latent width].

        Raises ValueError for a row that leaves tokens out and has no pages.
        """
        edits = [Edit(row, self.num_blocks, self._kernels) for row in rows]
        stream = self._start(rows, edits, [edit.computed(0) for edit in edits])
        for number, block in enumerate(self._blocks):
            stream.keep([edit.kept(number) for edit in edits])
            block.run(stream, number)
        stream.keep([edit.kept(self.num_blocks) for edit in edits])
        velocity = self._project_out(stream)
        return [velocity[start:stop] for start, stop in stream.packing.image]

    def prime(self, rows: Sequence[PrimeRow], blocks: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        """All image tokens of each row through the blocks [start, stop), whose pages are written into its entry.

        Returns each row's hidden state for the next chunk, [text and image tokens, hidden]; () after the last block, of
        which only keys and values are computed. A row's bits depend neither on the other rows nor on the chunks.
        """
        templates = [Template(self._entry(row), len(row.latents)) for row in rows]
        stream = self._start(rows, templates, [None] * len(rows))
        for number in range(*blocks):
            if number == self.num_blocks - 1:
                self._blocks[number].finish(stream, number)
                return [()] * len(rows)
            self._blocks[number].run(stream, number)
        return [(stream.hidden[start:stop].clone(),) for start, stop in stream.packing.joint]

    def modulation(self, pooled_prompt_embeds: Tensor, guidance_scale: float, sigmas: Tensor) -> Tensor | None:
        """What `Row.modulation` may hold at each of these noise levels, [levels, width]: all blocks' shifts, scales and
        gates, with the bits that every step would compute. None where that is more than MODULATION_BYTES.
        """
        width = sum(part.width for part in self._modulations)
        if len(sigmas) * width * self.dtype.itemsize > MODULATION_BYTES:
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
                row.latents.shape[0] if tokens is None else len(tokens)
                for row, tokens in zip(rows, computed, strict=True)
            ],
        )
        hidden = [row.hidden[0] for row in rows if isinstance(row, PrimeRow) and row.hidden is not None]
        rotary = torch.cat([self._rotary(row, source.rows(0)) for row, source in zip(rows, sources, strict=True)])
        joint = torch.cat(hidden) if hidden else self._embed(rows, computed, packing)
        keys_values = self._keys_values(rows, joint)
        modulation = self._modulation_of(rows)
        return Stream(joint, packing, rotary, modulation, sources, keys_values, self._linear, self._kernels)

    def _keys_values(self, rows: Sequence[Row | PrimeRow], like: Tensor) -> list[KeysValues]:
        """Room for one request at a time, used for every request and block of a pass; dtype and device of `like`."""
        heads, head_dim = self.module.config.num_attention_heads, self.module.config.attention_head_dim
        sizes = [(row.prompt_embeds.shape[0], row.latents.shape[0]) for row in rows]
        room = like.new_empty(2 * heads * max(map(sum, sizes)) * head_dim)
        return [KeysValues(room, heads, head_dim, *size) for size in sizes]

    def _modulation_of(self, rows: Sequence[Row | PrimeRow]) -> Callable[[int], Sequence[Tensor]]:
        """Block number -> its shifts, scales and gates, each [requests, hidden]; after the last one the output's."""
        known = [row.modulation for row in rows if isinstance(row, Row) and row.modulation is not None]
        if len(known) == len(rows):
            tables = torch.cat(known).split([part.width for part in self._modulations], dim=1)
            return lambda number: self._modulations[number].parts(tables[number])
        embeddings = [self._embedding(row.sigma, row.pooled_prompt_embeds, row.guidance_scale) for row in rows]
        conditioning = F.silu(torch.cat(embeddings))
        return lambda number: self._modulations[number].parts(self._modulations[number].product(conditioning))

    def _embed(self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing) -> Tensor:
        """Text and image tokens of all rows, [tokens, hidden]."""
        inputs = [
            torch.cat([_select(row.latents, tokens), _select(row.condition, tokens)], dim=1)
            for row, tokens in zip(rows, computed, strict=True)
        ]
        image = self._image_in(torch.cat(inputs))
        text = self._text_in(torch.cat([row.prompt_embeds for row in rows]))
        return packing.join(text, image)

    def _embedding(self, sigma: Tensor, pooled_prompt_embeds: Tensor, guidance_scale: float) -> Tensor:
        """Time, guidance and pooled text of one request, [1, hidden].

        One request at a time: a product's rounding may depend on its number of rows when these are few.
        """
        timestep = (sigma * self._num_train_timesteps).reshape(1).to(self.dtype)
        timestep = (timestep / 1000).to(self.dtype) * 1000  # the pipeline divides, the module multiplies
        inputs = [timestep, pooled_prompt_embeds[None]]
        if self.module.config.guidance_embeds:
            guidance = torch.full([1], guidance_scale, dtype=torch.float32, device=timestep.device)
            inputs.insert(1, guidance.to(self.dtype) * 1000)
        embedding: Tensor = self.module.time_text_embed(*inputs)
        return embedding

    def _rotary(self, row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
        """Rotations of these of a request's tokens, complex64 [tokens, 1, 1, head dim / 2]."""
        return _select(self._rotary_table(row.prompt_embeds.shape[0], row.grid), tokens)

    def _make_rotary_table(self, text_tokens: int, grid: tuple[int, int]) -> Tensor:
        """Rotations of text, which is all at position 0, and of every token of an image, row by row."""
        height, width = grid
        image = torch.zeros(height, width, 3)
        image[..., 1] = torch.arange(height)[:, None]
        image[..., 2] = torch.arange(width)[None]
        ids = torch.cat([torch.zeros(text_tokens, 3), image.reshape(-1, 3)])
        cos, sin = self.module.pos_embed(ids.to(self.dtype))
        table = torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())  # each angle is stored twice
        return table[:, None, None].to(self.module.device)

    def _entry(self, row: PrimeRow) -> Entry:
        """The entry to write; its size tells the dtype of its pages."""
        num_tokens, size = len(row.latents), row.entry.numel()
        for layout in map(self.page_layout, get_args(PageDtype)):
            if layout.entry_bytes(num_tokens) == size:
                return Entry(row.entry, layout, num_tokens)
        raise ValueError(f"an entry of {size} bytes holds no pages of {num_tokens} tokens of this model")

    # ------------------------------------------------------------------------------------------------------- output

    def _project_out(self, stream: Stream) -> Tensor:
        """Velocity of all image tokens, [tokens, latent width]."""
        factor, shift = stream.modulation(self.num_blocks)
        where, eps = stream.packing.joint_image, self.module.norm_out.norm.eps
        return self._image_out(norm_modulate(stream.hidden, where, eps, factor, shift, fused=stream.fused))


def _select(x: Tensor, tokens: Tensor | None) -> Tensor:
    """These rows of x, None for all."""
    return x if tokens is None else x[tokens]

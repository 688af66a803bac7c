"""Stable Diffusion 3's denoiser, which runs the sublayers of a diffusers `SD3Transformer2DModel`.

Follows `diffusers/models/transformers/transformer_sd3.py`, with two differences. Text tokens come before image tokens
here and after them there, so sums are taken in another order; and the convolution that embeds patches, which do not
overlap, runs as a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from model_executor.kernels.held import hold
from model_executor.kernels.operators import Operators
from model_executor.kernels.ragged import Packing, together
from model_executor.models.base import PrimeRow, Row
from model_executor.models.transformer.blocks import Block, DoubleBlock
from model_executor.models.transformer.denoiser import CACHED_GRIDS, channels_first, select
from model_executor.models.transformer.stream import Stream
from model_executor.models.transformer.text_denoiser import TextDenoiser
from model_executor.patches.batch_patches import Where


class SD3Transformer(TextDenoiser):
    """Double blocks only, some with a second attention. Positions are added to the tokens, not rotated into queries and
    keys. Does not read guidance."""

    def __init__(
        self, module: Any, num_train_timesteps: int, operators: Operators | None = None, *, owns_module: bool = False
    ) -> None:
        self._positions = lru_cache(maxsize=CACHED_GRIDS)(self._make_positions)
        super().__init__(module, num_train_timesteps, operators, owns_module=owns_module)

    @staticmethod
    def _count_pages(config: Mapping[str, Any]) -> int:
        return int(config["num_layers"]) + len(config.get("dual_attention_layers", ()))

    def _make_blocks(self) -> list[Block]:
        module = self.module
        self._patch: int = module.config.patch_size
        self._image_in = self._group(module.pos_embed.proj)
        self._text_in = self._group(module.context_embedder)
        return [DoubleBlock(block, self._group) for block in module.transformer_blocks]

    def _embed(
        self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing, where: Where
    ) -> Tensor:
        chosen = list(zip(rows, computed, strict=True))
        image = self._image_in(together([select(row.latents, tokens) for row, tokens in chosen]), where.image)
        positions = together([select(hold(self._positions(row.grid)), tokens) for row, tokens in chosen])
        text = self._text_in(together([row.prompt_embeds for row in rows]), where.text)
        return packing.join(text, (image + positions).to(image.dtype))

    def _embedding(self, embed: Any, sigma: Tensor, pooled_prompt_embeds: Tensor, guidance_scale: float) -> Tensor:
        """The embedding of time and pooled text."""
        timestep = (sigma * self._num_train_timesteps).reshape(1)
        embedding: Tensor = embed(timestep, pooled_prompt_embeds[None])
        return embedding

    def _make_positions(self, grid: tuple[int, int]) -> Tensor:
        """Position embeddings, cropped from the middle of the model's square table: [image tokens, hidden]."""
        positions: Tensor = self.module.pos_embed.cropped_pos_embed(*(side * self._patch for side in grid))
        return positions[0]

    def _project_out(self, stream: Stream) -> Tensor:
        """Also reorders patches, which have their channels last in the module and first in latents."""
        return channels_first(super()._project_out(stream), self._patch)

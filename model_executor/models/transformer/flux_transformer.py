"""FLUX's denoiser, which runs the sublayers of a diffusers `FluxTransformer2DModel`.

Follows `diffusers/models/transformers/transformer_flux.py`: with `plain_linear`, one request and every token active,
the result is bit-identical to the module's own forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from model_executor.kernels.ragged import Packing, together
from model_executor.models.base import PrimeRow, Row
from model_executor.models.transformer.blocks import Block, DoubleBlock, SingleBlock
from model_executor.models.transformer.denoiser import select, with_conditions
from model_executor.models.transformer.text_denoiser import TextDenoiser
from model_executor.patches.batch_patches import Where


class FluxTransformer(TextDenoiser):
    """Double blocks, then single ones; rotary positions; guidance, where the model has an embedding for it."""

    # As diffusers' FluxLoraLoaderMixin: an adapter of FLUX.1 dev is used in Fill, whose first layer reads more.
    fits_narrow_adapters = True

    @staticmethod
    def _count_pages(config: Mapping[str, Any]) -> int:
        return int(config["num_layers"] + config["num_single_layers"])

    def _make_blocks(self) -> list[Block]:
        module = self.module
        self._image_in, self._text_in = self._group(module.x_embedder), self._group(module.context_embedder)
        doubles = [DoubleBlock(block, self._group) for block in module.transformer_blocks]
        return [*doubles, *(SingleBlock(block, self._group) for block in module.single_transformer_blocks)]

    def _embed(
        self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing, where: Where
    ) -> Tensor:
        inputs = [self._inputs(row, tokens) for row, tokens in zip(rows, computed, strict=True)]
        image = self._image_in(together(inputs), where.image)
        text = self._text_in(together([row.prompt_embeds for row in rows]), where.text)
        return packing.join(text, image)

    def _inputs(self, row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
        """The denoiser's input for these tokens, None for all."""
        latents = select(row.latents, tokens)
        return torch.cat([latents, select(row.condition, tokens)], dim=1) if row.condition.shape[1] else latents

    def _embedding(self, embed: Any, sigma: Tensor, pooled_prompt_embeds: Tensor, guidance_scale: float) -> Tensor:
        """The embedding of time, guidance and pooled text."""
        timestep = self._timestep(sigma)
        inputs = [timestep, pooled_prompt_embeds[None]]
        if self.module.config.guidance_embeds:
            guidance = torch.full([1], guidance_scale, dtype=torch.float32, device=timestep.device)
            inputs.insert(1, guidance.to(self.dtype) * 1000)
        embedding: Tensor = embed(*inputs)
        return embedding

    def _timestep(self, sigma: Tensor) -> Tensor:
        """That of a noise level, [1]."""
        timestep = (sigma * self._num_train_timesteps).reshape(1).to(self.dtype)
        return (timestep / 1000).to(self.dtype) * 1000  # the pipeline divides, the module multiplies

    def _make_rotary_table(self, text_tokens: int, grids: tuple[tuple[int, int], ...]) -> Tensor:
        """All text tokens are at position 0. Axes: picture, row, column."""
        pictures = [
            torch.cartesian_prod(torch.tensor([float(number)]), *(torch.arange(float(side)) for side in grid))
            for number, grid in enumerate(grids)
        ]
        ids = torch.cat([torch.zeros(text_tokens, 3), *pictures])
        return self._turns(ids.to(self.dtype))

    def _turns(self, ids: Tensor) -> Tensor:
        """Rotations of tokens at these positions, [tokens, axes]: complex64 [tokens, 1, 1, head dim / 2]."""
        cos, sin = self.module.pos_embed(ids)
        table = torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())  # each angle is stored twice
        return table[:, None, None].to(self._device)


class FluxKontextTransformer(FluxTransformer):
    """FLUX.1 Kontext's denoiser: where there is a template, its clean tokens follow those of the image, at the
    same positions of a second picture (`prepare_latents` of diffusers/pipelines/flux/pipeline_flux_kontext.py)."""

    rows_per_token = 2

    def _inputs(self, row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
        """Also for the condition tokens, which come last."""
        return with_conditions(row, tokens)

"""FLUX.2's denoiser, which runs the sublayers of a diffusers `Flux2Transformer2DModel`.

Follows `diffusers/models/transformers/transformer_flux2.py`: with `plain_linear`, one request and every token active,
the result is bit-identical to the module's own forward. Guidance that is distilled into it, as in FLUX.2-dev, is not
read.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from model_executor.models.base import PrimeRow, Row
from model_executor.models.transformer.blocks import Block, DoubleBlock, FusedBlock
from model_executor.models.transformer.denoiser import with_conditions
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.models.transformer.modulation import Modulation

CONDITION_TIME = 10
"""Distance of pictures on the first axis, where the image is at 0: the pipelines' number."""


class Flux2Transformer(FluxTransformer):
    """Double blocks share one modulation, single blocks another one. The tokens of the clean template, if there is one,
    follow those of the image, at the same rows and columns; text tokens are counted on an axis of their own."""

    rows_per_token = 2
    fits_narrow_adapters = False
    embedding: ClassVar[str] = "time_guidance_embed"

    def _make_blocks(self) -> list[Block]:
        module, group = self.module, self._group
        self._image_in, self._text_in = group(module.x_embedder), group(module.context_embedder)
        layers = [module.double_stream_modulation_img.linear, module.double_stream_modulation_txt.linear]
        of_doubles = Modulation(layers, [1, 4, 7, 10], group)
        of_singles = Modulation([module.single_stream_modulation.linear], [1], group)
        doubles = [DoubleBlock(block, group, of_doubles) for block in module.transformer_blocks]
        return [*doubles, *(FusedBlock(block, group, of_singles) for block in module.single_transformer_blocks)]

    def _inputs(self, row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
        return with_conditions(row, tokens)

    def _embedding(self, embed: Any, sigma: Tensor, pooled_prompt_embeds: Tensor, guidance_scale: float) -> Tensor:
        """The embedding of time."""
        embedding: Tensor = embed(self._timestep(sigma), None)
        return embedding

    def _make_rotary_table(self, text_tokens: int, grids: tuple[tuple[int, int], ...]) -> Tensor:
        """Axes: picture, row, column, text token."""
        text = torch.zeros(text_tokens, 4)
        text[:, 3] = torch.arange(text_tokens)
        pictures = [
            torch.cartesian_prod(
                torch.tensor([float(CONDITION_TIME * number)]),
                *(torch.arange(float(side)) for side in grid),
                torch.zeros(1),
            )
            for number, grid in enumerate(grids)
        ]
        return self._turns(torch.cat([text, *pictures]))

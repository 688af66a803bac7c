"""The denoiser of class-conditional DiTs, which runs the sublayers of a diffusers `DiTTransformer2DModel`.

Follows `diffusers/models/transformers/dit_transformer_2d.py`, with two differences. The convolution that embeds
patches, which do not overlap, runs as a linear layer. And noise level and class, which each block embeds with layers of
its own, are embedded for all blocks at once: those of the class are the row's `pooled_prompt_embeds`, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from torch import Tensor

from model_executor.kernels.held import hold
from model_executor.kernels.linear_groups import AnyGroup
from model_executor.kernels.low_rank import Segments
from model_executor.kernels.operators import Operators
from model_executor.kernels.ragged import Packing, together
from model_executor.kernels.residual import Norm
from model_executor.models.base import PrimeRow, Row
from model_executor.models.transformer.blocks import Block, ImageBlock
from model_executor.models.transformer.denoiser import CACHED_GRIDS, Conditions, Denoiser, channels_first, select
from model_executor.models.transformer.modulation import Modulation
from model_executor.models.transformer.stream import Stream
from model_executor.patches.batch_patches import Where

CACHED_CLASSES = 64
"""Classes whose embeddings are cached. In DiT-XL those of one take 129 KB in float32."""


class DiTTransformer(Denoiser):
    """Blocks of image tokens alone; positions are added to the tokens. Predicts noise, and in most checkpoints its
    variance, which is dropped. Does not read guidance."""

    def __init__(
        self, module: Any, num_train_timesteps: int, operators: Operators | None = None, *, owns_module: bool = False
    ) -> None:
        self._positions = lru_cache(maxsize=CACHED_GRIDS)(self._make_positions)
        self.embed_class = lru_cache(maxsize=CACHED_CLASSES)(self._embed_class)
        super().__init__(module, num_train_timesteps, operators, owns_module=owns_module)

    def _embed_class(self, label: int) -> Tensor:
        """Every block's embedding of a class, side by side: [blocks * hidden]. label: 0 .. number of classes, the last
        of which stands for any class."""
        tables = (block.norm1.emb.class_embedder.embedding_table for block in self.module.transformer_blocks)
        return torch.cat([table.weight[label] for table in tables])

    @staticmethod
    def _count_pages(config: Mapping[str, Any]) -> int:
        return int(config["num_layers"])

    def _make_blocks(self) -> list[Block]:
        blocks = self.module.transformer_blocks
        self._image_in = self._group(self.module.pos_embed.proj)
        embedders = [block.norm1.emb.timestep_embedder for block in blocks]
        self._time_in = self._group(*(embedder.linear_1 for embedder in embedders))
        self._time_out = [self._group(embedder.linear_2) for embedder in embedders]
        return [ImageBlock(block, self._group) for block in blocks]

    def _make_output(self) -> tuple[Modulation, AnyGroup]:
        return Modulation([self.module.proj_out_1], [1], self._group), self._group(self.module.proj_out_2)

    def _embed(
        self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing, where: Where
    ) -> Tensor:
        chosen = list(zip(rows, computed, strict=True))
        image = self._image_in(together([select(row.latents, tokens) for row, tokens in chosen]), where.image)
        positions = together([select(hold(self._positions(row.grid)), tokens) for row, tokens in chosen])
        return (image + positions).to(image.dtype)

    def _make_positions(self, grid: tuple[int, int]) -> Tensor:
        """Position embeddings, as PatchEmbed makes them: [image tokens, hidden]."""
        embed = self.module.pos_embed
        if grid == (embed.height, embed.width):
            positions: Tensor = embed.pos_embed[0]
            return positions
        return get_2d_sincos_pos_embed(  # type: ignore[no-any-return]
            embed_dim=embed.pos_embed.shape[-1],
            grid_size=grid,
            base_size=embed.base_size,
            interpolation_scale=embed.interpolation_scale,
            device=self._device,
            output_type="pt",
        ).float()

    def _conditioning(self, rows: Sequence[Conditions], where: Segments) -> Sequence[Tensor]:
        """The output norm has the first block's. Steps begin at whole timesteps, which noise levels are shares of."""
        blocks = self.module.transformer_blocks
        timesteps = (torch.stack([row.sigma for row in rows]) * self._num_train_timesteps).round()
        waves = blocks[0].norm1.emb.time_proj(timesteps).to(self.dtype)
        classes = torch.stack([row.pooled_prompt_embeds for row in rows]).chunk(len(blocks), dim=1)
        times = self._time_in(waves, where).chunk(len(blocks), dim=1)
        embeddings = [
            F.silu(layer(F.silu(time), where) + its_class)
            for layer, time, its_class in zip(self._time_out, times, classes, strict=True)
        ]
        return [*embeddings, embeddings[0]]

    def _project_out(self, stream: Stream) -> Tensor:
        """Noise of all image tokens, without its variance: [tokens, latent width]."""
        shift, factor = stream.modulation(len(self._blocks))
        norm = Norm(stream.packing.joint_image, factor, shift)
        (normed,) = stream.residual.normed(self.module.norm_out.eps, norm)
        patch, channels = self.module.config.patch_size, self.module.config.in_channels
        return channels_first(self._image_out(normed, stream.where.image), patch)[:, : channels * patch**2]

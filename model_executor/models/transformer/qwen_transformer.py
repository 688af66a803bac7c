"""Qwen-Image's denoiser, which runs the sublayers of a diffusers `QwenImageTransformer2DModel`.

Follows `diffusers/models/transformers/transformer_qwenimage.py`: with `plain_linear`, one request and every token
computed, the result is that of the module's own forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from model_executor.kernels.ragged import Packing, together
from model_executor.models.base import PrimeRow, Row
from model_executor.models.transformer.blocks import Block, DoubleBlock
from model_executor.models.transformer.denoiser import select, with_conditions
from model_executor.models.transformer.text_denoiser import TextDenoiser
from model_executor.patches.batch_patches import Where


class QwenTransformer(TextDenoiser):
    """Double blocks only. Rotary positions count from the middle of the picture, and for text from beyond its edge. Has
    neither pooled text nor guidance."""

    @staticmethod
    def _count_pages(config: Mapping[str, Any]) -> int:
        return int(config["num_layers"])

    def _make_blocks(self) -> list[Block]:
        module = self.module
        self._image_in, self._text_in = self._group(module.img_in), self._group(module.txt_in)
        return [DoubleBlock(_renamed(block), self._group) for block in module.transformer_blocks]

    def _embed(
        self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing, where: Where
    ) -> Tensor:
        chosen = zip(rows, computed, strict=True)
        image = self._image_in(together([self._inputs(row, tokens) for row, tokens in chosen]), where.image)
        prompts = together([row.prompt_embeds for row in rows])
        text = self._text_in(self._operators.rms_norm(self.module.txt_norm, prompts), where.text)
        return packing.join(text, image)

    def _inputs(self, row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
        """The denoiser's input for these tokens, None for all."""
        return select(row.latents, tokens)

    def _embedding(self, embed: Any, sigma: Tensor, pooled_prompt_embeds: Tensor, guidance_scale: float) -> Tensor:
        timestep = (sigma * self._num_train_timesteps).reshape(1).to(self.dtype) / 1000
        embedding: Tensor = embed(timestep, timestep)  # the second argument only gives the dtype
        return embedding

    def _make_rotary_table(self, text_tokens: int, grids: tuple[tuple[int, int], ...]) -> Tensor:
        pictures = [(1, *grid) for grid in grids]
        image, text = self.module.pos_embed([pictures], max_txt_seq_len=text_tokens, device=self._device)
        return torch.cat([text, image])[:, None, None]


class QwenEditTransformer(QwenTransformer):
    """The tokens of the clean template follow those of the image, at the same positions of a second frame. With
    `zero_cond_t` they are modulated as what they are, at noise level 0."""

    rows_per_token = 2

    def _make_blocks(self) -> list[Block]:
        self.sees_clean_conditions = bool(self.module.config.zero_cond_t)
        return super()._make_blocks()

    def _inputs(self, row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
        return with_conditions(row, tokens)


def _renamed(block: Any) -> SimpleNamespace:
    """A block with its layers named as in FLUX's double blocks, which compute the same."""
    return SimpleNamespace(
        attn=block.attn,
        norm1=SimpleNamespace(norm=block.img_norm1, linear=block.img_mod[1]),
        norm1_context=SimpleNamespace(norm=block.txt_norm1, linear=block.txt_mod[1]),
        ff=block.img_mlp,
        ff_context=block.txt_mlp,
    )

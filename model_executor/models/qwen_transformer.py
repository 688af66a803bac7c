"""Qwen-Image's denoiser over the sublayers of a diffusers `QwenImageTransformer2DModel`.

Follows `diffusers/models/transformers/transformer_qwenimage.py`: with `plain_linear`, one request and every token
computed, the result is the module's own forward's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from model_executor.kernels.ragged import Packing
from model_executor.models.base import PrimeRow, Row
from model_executor.models.blocks import Block, DoubleBlock
from model_executor.models.denoiser import Denoiser, select


class QwenTransformer(Denoiser):
    """Double blocks only; rotary positions that count from the middle of the picture, and for text from beyond its
    edge; no pooled text and no guidance."""

    @staticmethod
    def _count_pages(config: Mapping[str, Any]) -> int:
        return int(config["num_layers"])

    def _make_blocks(self) -> list[Block]:
        module = self.module
        self._image_in, self._text_in = self._group(module.img_in), self._group(module.txt_in)
        return [DoubleBlock(_renamed(block), self._group) for block in module.transformer_blocks]

    def _embed(self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing) -> Tensor:
        chosen = zip(rows, computed, strict=True)
        image = self._image_in(torch.cat([self._inputs(row, tokens) for row, tokens in chosen]))
        text = self._text_in(self.module.txt_norm(torch.cat([row.prompt_embeds for row in rows])))
        return packing.join(text, image)

    def _inputs(self, row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
        """What is under these tokens."""
        return select(row.latents, tokens)

    def _embedding(self, sigma: Tensor, pooled_prompt_embeds: Tensor, guidance_scale: float) -> Tensor:
        timestep = (sigma * self._num_train_timesteps).reshape(1).to(self.dtype) / 1000
        embedding: Tensor = self._time_text_embed(timestep, timestep)  # of the latter the dtype is taken
        return embedding

    def _make_rotary_table(self, text_tokens: int, grid: tuple[int, int]) -> Tensor:
        pictures = [(1, *grid)] * self.rows_per_token
        image, text = self.module.pos_embed([pictures], max_txt_seq_len=text_tokens, device=self._device)
        return torch.cat([text, image])[:, None, None]


class QwenEditTransformer(QwenTransformer):
    """The clean template's tokens stand behind the image's, at the same places of a second frame."""

    rows_per_token = 2

    def _inputs(self, row: Row | PrimeRow, tokens: Tensor | None) -> Tensor:
        return torch.cat([row.latents, row.condition]) if tokens is None else row.latents[tokens]


def _renamed(block: Any) -> SimpleNamespace:
    """A block by the names of FLUX's double blocks, which do the same."""
    return SimpleNamespace(
        attn=block.attn,
        norm1=SimpleNamespace(norm=block.img_norm1, linear=block.img_mod[1]),
        norm1_context=SimpleNamespace(norm=block.txt_norm1, linear=block.txt_mod[1]),
        ff=block.img_mlp,
        ff_context=block.txt_mlp,
    )

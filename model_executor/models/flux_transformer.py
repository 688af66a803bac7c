"""FLUX's denoiser, block by block, over the sublayers of a diffusers `FluxTransformer2DModel`.

Follows `diffusers/models/transformers/transformer_flux.py`: with `plain_linear`, one request and every token active,
the result is bit-identical to the module's own forward. What differs is the batch: rows of many requests in one matrix
(see `ragged.py`), modulation computed per request, attention per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from model_executor.attention import attend, rotate
from model_executor.linear import Linear, best_linear
from model_executor.models.base import Row
from model_executor.ragged import Packing, gate_, modulate_

FLOAT16_MAX = 65504.0
CACHED_GRIDS = 32
"""Rotary tables kept, one per image size; a table is 8 bytes * tokens * head dim / 2."""


class FluxTransformer:
    """A ragged forward pass. `module` is a diffusers FluxTransformer2DModel; `num_train_timesteps` is its
    scheduler's."""

    def __init__(self, module: nn.Module, num_train_timesteps: int, linear: Linear | None = None) -> None:
        self.module: Any = module
        self._num_train_timesteps = num_train_timesteps
        self._linear = linear or best_linear()
        self._grid_rotary = lru_cache(maxsize=CACHED_GRIDS)(self._make_grid_rotary)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.module.dtype
        return dtype

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Velocity of each row's active tokens, [active tokens, latent width]."""
        image = self._linear(self.module.x_embedder, torch.cat([_active_input(row) for row in rows]))
        text = self._linear(self.module.context_embedder, torch.cat([row.prompt_embeds for row in rows]))
        packing = Packing.of([row.prompt_embeds.shape[0] for row in rows], [_num_active(row) for row in rows])
        rotary = torch.cat([self._rotary(row) for row in rows])
        embedding = torch.cat([self._embedding(row) for row in rows])
        conditioning = nn.functional.silu(embedding)
        for block in self.module.transformer_blocks:
            text, image = self._double_block(block, text, image, conditioning, rotary, packing)
        joint = packing.join(text, image)
        for block in self.module.single_transformer_blocks:
            joint = self._single_block(block, joint, conditioning, rotary, packing)
        velocity = self._project_out(packing.split(joint)[1], conditioning, packing)
        return [velocity[start:stop] for start, stop in packing.image]

    # ------------------------------------------------------------------------------------------------------- inputs

    def _embedding(self, row: Row) -> Tensor:
        """Time, guidance and pooled text of one request, [1, hidden].

        One request at a time: a product's rounding may depend on its number of rows when these are few.
        """
        timestep = (row.sigma * self._num_train_timesteps).reshape(1).to(self.dtype)
        timestep = (timestep / 1000).to(self.dtype) * 1000  # the pipeline divides, the module multiplies
        pooled = row.pooled_prompt_embeds[None]
        inputs = [timestep, pooled]
        if self.module.config.guidance_embeds:
            guidance = torch.full([1], row.guidance_scale, dtype=torch.float32, device=timestep.device)
            inputs.insert(1, guidance.to(self.dtype) * 1000)
        embedding: Tensor = self.module.time_text_embed(*inputs)
        return embedding

    def _rotary(self, row: Row) -> Tensor:
        """Rotations of a request's text and active image tokens, complex64 [tokens, 1, head dim / 2]."""
        grid = self._grid_rotary(row.grid)
        image = grid if row.active is None else grid[row.active]
        text = torch.ones_like(grid[:1]).expand(row.prompt_embeds.shape[0], -1, -1)  # text is at position 0: no turn
        return torch.cat([text, image])

    def _make_grid_rotary(self, grid: tuple[int, int]) -> Tensor:
        """Rotations of every token of an image, row by row."""
        height, width = grid
        ids = torch.zeros(height, width, 3)
        ids[..., 1] = torch.arange(height)[:, None]
        ids[..., 2] = torch.arange(width)[None]
        cos, sin = self.module.pos_embed(ids.reshape(-1, 3).to(self.dtype))
        table = torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())  # each angle is stored twice
        return table[:, None].to(self.module.device)

    # ------------------------------------------------------------------------------------------------------- blocks

    def _double_block(
        self, block: Any, text: Tensor, image: Tensor, conditioning: Tensor, rotary: Tensor, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        shift, scale, gate, *image_mlp = self._linear(block.norm1.linear, conditioning).chunk(6, dim=1)
        text_shift, text_scale, text_gate, *text_mlp = self._linear(block.norm1_context.linear, conditioning).chunk(
            6, dim=1
        )
        image_in = modulate_(block.norm1.norm(image), packing.image, scale, shift)
        text_in = modulate_(block.norm1_context.norm(text), packing.text, text_scale, text_shift)
        attended = self._joint_attention(block.attn, text_in, image_in, rotary, packing)
        text_out, image_out = packing.split(attended)
        image = image + gate_(self._linear(block.attn.to_out[0], image_out), packing.image, gate)
        text = text + gate_(self._linear(block.attn.to_add_out, text_out), packing.text, text_gate)
        image = self._feed_forward(block.norm2, block.ff, image, packing.image, image_mlp)
        text = self._feed_forward(block.norm2_context, block.ff_context, text, packing.text, text_mlp)
        return _clip_float16(text), image

    def _joint_attention(self, attn: Any, text: Tensor, image: Tensor, rotary: Tensor, packing: Packing) -> Tensor:
        query = packing.join(
            attn.norm_added_q(self._heads(attn, attn.add_q_proj, text)),
            attn.norm_q(self._heads(attn, attn.to_q, image)),
        )
        key = packing.join(
            attn.norm_added_k(self._heads(attn, attn.add_k_proj, text)),
            attn.norm_k(self._heads(attn, attn.to_k, image)),
        )
        value = packing.join(self._heads(attn, attn.add_v_proj, text), self._heads(attn, attn.to_v, image))
        return attend(rotate(query, rotary), rotate(key, rotary), value, packing.joint)

    def _feed_forward(
        self, norm: Any, feed_forward: Any, x: Tensor, where: Sequence[tuple[int, int]], modulation: Sequence[Tensor]
    ) -> Tensor:
        shift, scale, gate = modulation
        inner = self._linear(feed_forward.net[0].proj, modulate_(norm(x), where, scale, shift), gelu=True)
        return x + gate_(self._linear(feed_forward.net[2], inner), where, gate)

    def _single_block(
        self, block: Any, joint: Tensor, conditioning: Tensor, rotary: Tensor, packing: Packing
    ) -> Tensor:
        shift, scale, gate = self._linear(block.norm.linear, conditioning).chunk(3, dim=1)
        normed = modulate_(block.norm.norm(joint), packing.joint, scale, shift)
        inner = self._linear(block.proj_mlp, normed, gelu=True)
        attn = block.attn
        query = rotate(attn.norm_q(self._heads(attn, attn.to_q, normed)), rotary)
        key = rotate(attn.norm_k(self._heads(attn, attn.to_k, normed)), rotary)
        attended = attend(query, key, self._heads(attn, attn.to_v, normed), packing.joint)
        out = self._linear(block.proj_out, torch.cat([attended, inner], dim=1))
        return _clip_float16(joint + gate_(out, packing.joint, gate))

    def _heads(self, attn: Any, projection: nn.Module, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, heads, head dim]."""
        heads: Tensor = self._linear(projection, x).unflatten(-1, (-1, attn.head_dim))
        return heads

    def _project_out(self, image: Tensor, conditioning: Tensor, packing: Packing) -> Tensor:
        scale, shift = self._linear(self.module.norm_out.linear, conditioning).chunk(2, dim=1)
        image = modulate_(self.module.norm_out.norm(image), packing.image, scale, shift)
        return self._linear(self.module.proj_out, image)


def _active_input(row: Row) -> Tensor:
    """What the denoiser sees of a request's active image tokens, [active tokens, latent + condition width]."""
    x = torch.cat([row.latents, row.condition], dim=1)
    return x if row.active is None else x[row.active]


def _num_active(row: Row) -> int:
    return row.latents.shape[0] if row.active is None else row.active.shape[0]


def _clip_float16(x: Tensor) -> Tensor:
    return x.clip(-FLOAT16_MAX, FLOAT16_MAX) if x.dtype == torch.float16 else x

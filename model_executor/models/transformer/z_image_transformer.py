"""Z-Image's denoiser, which runs the sublayers of a diffusers `ZImageTransformer2DModel`.

Follows `diffusers/models/transformers/transformer_z_image.py`, with three differences. Text tokens come before image
tokens here and after them there, so sums are taken in another order. The module pads prompt and picture to a multiple
of 32 tokens, all of which attend and are attended to: the picture's padding is among the text tokens here, as fillers.
And the prompt's own layers, which see no noise level, run once for all steps (`Row.prompt_state`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.patches import PatchSet
from model_executor.kernels.linear_groups import AnyGroup
from model_executor.kernels.low_rank import Segments
from model_executor.kernels.ragged import Packing, together
from model_executor.kernels.residual import Norm
from model_executor.models.base import PrimeRow, Row
from model_executor.models.latents import PATCH
from model_executor.models.transformer.blocks import Block
from model_executor.models.transformer.denoiser import Conditions, Denoiser, channels_first, channels_last, select
from model_executor.models.transformer.modulation import Modulation
from model_executor.models.transformer.sandwich_block import PromptBlock, PromptSource, SandwichBlock
from model_executor.models.transformer.stream import Stream
from model_executor.patches.batch_patches import BatchPatches, Where

MULTIPLE = 32
"""Prompt and picture are each filled up to a multiple of this many tokens; diffusers' SEQ_MULTI_OF."""

PATCHES = f"{PATCH}-1"
"""Name of the layers for patches of this side and one frame."""


class ZImageTransformer(Denoiser):
    """Blocks of image tokens alone, then of text and image tokens; rotary positions. Has neither pooled text nor
    guidance. Its time runs from 0 to 1 as the noise falls, and its velocity points to the picture, which is turned
    round here."""

    @staticmethod
    def _count_pages(config: Mapping[str, Any]) -> int:
        return int(config["n_refiner_layers"] + config["n_layers"])

    @staticmethod
    def _heads_of(config: Mapping[str, Any]) -> tuple[int, int]:
        return config["n_heads"], config["dim"] // config["n_heads"]

    def _make_blocks(self) -> list[Block]:
        module, group = self.module, self._group
        self._image_in = group(module.all_x_embedder[PATCHES])
        self._text_norm, text_in = module.cap_embedder
        self._text_in = group(text_in)
        time_in, _, time_out = module.t_embedder.mlp
        self._time_in, self._time_out = group(time_in), group(time_out)
        self._prompt_blocks = [PromptBlock(block, group) for block in module.context_refiner]
        alone = [SandwichBlock(block, group, of_image=True) for block in module.noise_refiner]
        return [*alone, *(SandwichBlock(block, group, of_image=False) for block in module.layers)]

    def _make_output(self) -> tuple[Modulation, AnyGroup]:
        last = self.module.all_final_layer[PATCHES]
        return Modulation([last.adaLN_modulation[1]], [0], self._group, num_parts=1), self._group(last.linear)

    # ------------------------------------------------------------------------------------------------- the prompt

    def _text_tokens(self, row: Row | PrimeRow) -> int:
        return filled(len(row.prompt_embeds)) + self._fillers(row)

    def _fillers(self, row: Row | PrimeRow) -> int:
        return filled(len(row.latents)) - len(row.latents)

    def prompt_state(self, prompt_embeds: Tensor, patches: PatchSet) -> Tensor:
        """The prompt's tokens, filled up, after the layers that are theirs alone: [text tokens, hidden]. One prompt at
        a time, so that its bits depend on no other."""
        number, of_row = len(prompt_embeds), BatchPatches([patches], self._device)
        normed = self._operators.rms_norm(self._text_norm, prompt_embeds)
        embedded = self._text_in(normed, of_row.segments([(0, number)]))
        tokens = filled(number)
        padding = self.module.cap_pad_token.expand(tokens - number, -1)
        hidden, packing = torch.cat([embedded, padding.to(embedded)]), Packing.of([tokens], [0])
        stream = Stream(
            residual=self._operators.residual(hidden),
            packing=packing,
            patches=of_row,
            where=of_row.on(packing),
            rotary=self._prompt_rotary(tokens),
            modulation=lambda _: (),
            sources=[PromptSource(tokens)],
            joint_attention=self._operators.attention([(tokens, 0)], self._num_heads, self._head_dim, hidden),
            image_attention=None,
            operators=self._operators,
        )
        for block in self._prompt_blocks:
            block.run(stream)
        return stream.hidden

    # -------------------------------------------------------------------------------------------------- the picture

    def _embed(
        self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing, where: Where
    ) -> Tensor:
        latents = [select(row.latents, tokens) for row, tokens in zip(rows, computed, strict=True)]
        image = self._image_in(channels_last(together(latents), PATCH), where.image)
        filler, texts = self.module.x_pad_token.to(image), list[Tensor]()
        for row, number in zip(rows, packing.fillers, strict=True):
            texts += [self._prompt_state_of(row), filler.expand(number, -1)]
        return packing.join(torch.cat(texts), image)

    def _prompt_state_of(self, row: Row | PrimeRow) -> Tensor:
        known = row.prompt_state if isinstance(row, Row) else None
        return self.prompt_state(row.prompt_embeds, row.patches) if known is None else known

    def _conditioning(self, rows: Sequence[Conditions], where: Segments) -> Sequence[Tensor]:
        timesteps = torch.stack([row.sigma for row in rows]) * self._num_train_timesteps
        times = (1000 - timesteps) / 1000 * self.module.config.t_scale
        embedder = self.module.t_embedder
        waves = embedder.timestep_embedding(times, embedder.frequency_embedding_size).to(self.dtype)
        embedded = self._time_out(F.silu(self._time_in(waves, where)), where)
        return [*[embedded] * (len(self._modulations) - 1), F.silu(embedded)]

    def _make_rotary_table(self, text_tokens: int, grids: tuple[tuple[int, int], ...]) -> Tensor:
        """Along the first axis the module has fillers at 0, the prompt's tokens at 1, 2, ... and the image's behind
        them. Attention sees differences alone, so here the image is at 0 and the others are before it: what pages keep
        of a template must not depend on the length of a prompt."""
        ((height, width),) = grids
        fillers = filled(height * width) - height * width
        prompt = text_tokens - fillers
        before = torch.zeros(text_tokens, 3, dtype=torch.int32)
        before[:prompt, 0] = torch.arange(prompt, 0, -1)
        before[prompt:, 0] = prompt + 1
        image = torch.zeros(height, width, 3, dtype=torch.int32)
        image[..., 1] = torch.arange(height)[:, None]
        image[..., 2] = torch.arange(width)[None]
        backwards = self._rotations(before).conj_physical()
        return torch.cat([backwards, self._rotations(image.view(-1, 3))])

    def _prompt_rotary(self, text_tokens: int) -> Tensor:
        positions = torch.zeros(text_tokens, 3, dtype=torch.int32)
        positions[:, 0] = torch.arange(1, text_tokens + 1)
        return self._rotations(positions)

    def _rotations(self, positions: Tensor) -> Tensor:
        """Rotations at positions [tokens, 3]: complex64 [tokens, 1, 1, head dim / 2]."""
        table: Tensor = self.module.rope_embedder(positions)
        return table[:, None, None].to(self._device)

    def _project_out(self, stream: Stream) -> Tensor:
        """Also reorders patches, which have their channels last in the module and first in latents."""
        (factor,) = stream.modulation(len(self._blocks))
        factor = factor.contiguous()  # as the shift
        norm = Norm(stream.packing.joint_image, factor, torch.zeros_like(factor))
        (normed,) = stream.residual.normed(self.module.all_final_layer[PATCHES].norm_final.eps, norm)
        return channels_first(self._image_out(normed, stream.where.image), PATCH).neg_()


def filled(tokens: int) -> int:
    """The number of tokens that this many are filled up to."""
    return -(-tokens // MULTIPLE) * MULTIPLE

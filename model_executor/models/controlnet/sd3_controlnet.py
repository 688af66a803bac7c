"""Sd3ControlNet: ControlNets of Stable Diffusion 3 whose blocks see the text, as InstantX publishes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from model_executor.kernels.ragged import Packing, together
from model_executor.models.base import PrimeRow, Row
from model_executor.models.controlnet.control_row import ControlRow
from model_executor.models.controlnet.controlnet import Shown
from model_executor.models.controlnet.residuals import NOTHING
from model_executor.models.controlnet.transformer_controlnet import ControlTransformer, TransformerControlNet
from model_executor.models.transformer.blocks import Block
from model_executor.models.transformer.denoiser import select
from model_executor.models.transformer.sd3_transformer import SD3Transformer
from model_executor.patches.batch_patches import Where


class Sd3ControlTransformer(ControlTransformer, SD3Transformer):
    """Follows `diffusers/models/controlnets/controlnet_sd3.py`."""

    def _make_blocks(self) -> list[Block]:
        self._control_in = self._group(self.module.pos_embed_input.proj)
        return super()._make_blocks()

    def _layers_behind(self) -> Sequence[nn.Module]:
        return tuple(self.module.controlnet_blocks)

    def _embed(
        self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing, where: Where
    ) -> Tensor:
        mine = [(row, own) for row, own in zip(rows, computed, strict=True) if isinstance(row, ControlRow)]
        positions = together([select(select(self._positions(row.grid), row.tokens), own) for row, own in mine])
        image = self._image_in(together([select(row.latents, own) for row, own in mine]), ())
        control = self._control_in(together([select(row.control, own) for row, own in mine]), ())
        text = self._text_in(together([row.prompt_embeds[row.text] for row, _ in mine]), ())
        return packing.join(text, (image + positions).to(image.dtype) + control)


class Sd3ControlNet(TransformerControlNet):
    """Those with force_zeros_for_pooled_projection see no pooled prompt, and latents that are not shifted."""

    families: ClassVar[Collection[str]] = ("sd3",)
    alike = ("in_channels", "patch_size", "pooled_projection_dim", "num_attention_heads", "attention_head_dim")
    transformer = Sd3ControlTransformer

    def _check(self, modes: Collection[int]) -> None:
        config = self._config
        if config.get("joint_attention_dim") is None or not config.get("use_pos_embed", True):
            raise self._refuse("it sees no text (as those of Stable Diffusion 3.5 large), which is not served")
        if config.get("extra_conditioning_channels"):
            reason = "it sees the mask (extra_conditioning_channels), and those of control pictures alone are served"
            raise self._refuse(reason)
        if config["joint_attention_dim"] != self._model.config["joint_attention_dim"]:
            raise self._refuse(f"joint_attention_dim is {config['joint_attention_dim']}, not the transformer's")
        super()._check(modes)

    @property
    def _forces_zeros(self) -> bool:
        return bool(self._config.get("force_zeros_for_pooled_projection", True))

    def _embedded_numbers(self, control: Tensor, grid: tuple[int, int]) -> int:
        return control.numel() if self._forces_zeros else 0

    def embed(self, control: Tensor, mode: int | None) -> tuple[Tensor, ...]:
        return (control + self._model.latent_shift if self._forces_zeros else control,)

    def _row(self, row: Row, shown: Shown) -> ControlRow:
        mine = super()._row(row, shown)
        if not self._forces_zeros:
            return mine
        return replace(mine, pooled_prompt_embeds=torch.zeros_like(row.pooled_prompt_embeds))

    @property
    def _places(self) -> tuple[int, ...]:
        """As SD3Transformer2DModel has it: the last block adds nothing."""
        blocks, samples = int(self._model.config["num_layers"]), int(self._config["num_layers"])
        return *(int(number / (blocks / samples)) for number in range(blocks - 1)), NOTHING

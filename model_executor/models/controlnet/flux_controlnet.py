"""FluxControlNet: ControlNets of FLUX.1 dev, schnell and Fill, as InstantX and Shakker-Labs publish them, Union too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from model_executor.kernels.ragged import Packing, together
from model_executor.models.base import PrimeRow, Row
from model_executor.models.controlnet.control_row import ControlRow
from model_executor.models.controlnet.residuals import NOTHING
from model_executor.models.controlnet.transformer_controlnet import ControlTransformer, TransformerControlNet
from model_executor.models.latents import PATCH
from model_executor.models.transformer.blocks import Block
from model_executor.models.transformer.denoiser import select
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.models.transformer.row_sources import RowSource
from model_executor.patches.batch_patches import Where


class FluxControlTransformer(ControlTransformer, FluxTransformer):
    """Follows `diffusers/models/controlnets/controlnet_flux.py`."""

    def _make_blocks(self) -> list[Block]:
        self._control_in = self._group(self.module.controlnet_x_embedder)
        return super()._make_blocks()

    def _layers_behind(self) -> Sequence[nn.Module]:
        return *self.module.controlnet_blocks, *self.module.controlnet_single_blocks

    def _embed(
        self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing, where: Where
    ) -> Tensor:
        mine = [(row, own) for row, own in zip(rows, computed, strict=True) if isinstance(row, ControlRow)]
        control = self._control_in(together([select(row.control, own) for row, own in mine]), ())
        image = self._image_in(together([select(row.latents, own) for row, own in mine]), ()) + control
        text = [self._with_mode(row, self._text_in(row.prompt_embeds, ()))[row.text] for row, _ in mine]
        return packing.join(together(text), image)

    def _with_mode(self, row: ControlRow, text: Tensor) -> Tensor:
        """Embedded text, after the mode, if the ControlNet has modes."""
        if row.mode is None:
            return text
        mode: Tensor = self.module.controlnet_mode_embedder.weight[row.mode][None]
        return torch.cat([mode.to(text), text])

    def _text_tokens(self, row: Row | PrimeRow) -> int:
        has_mode = isinstance(row, ControlRow) and row.mode is not None
        return len(row.prompt_embeds) + has_mode

    def _rotary(self, row: Row | PrimeRow, source: RowSource) -> list[Tensor]:
        assert isinstance(row, ControlRow)
        table = self._rotary_table(source.text_tokens, (row.grid,))
        image = select(table[source.text_tokens :], row.tokens)
        return [table[: source.text_tokens][source.text], select(image, source.computed(0))]


class FluxControlNet(TransformerControlNet):
    """What a block of a few adds, several blocks in a row of the transformer add."""

    families: ClassVar[Collection[str]] = ("flux", "flux-fill")
    alike = ("joint_attention_dim", "pooled_projection_dim", "num_attention_heads", "attention_head_dim")
    transformer = FluxControlTransformer

    def _check(self, modes: Collection[int]) -> None:
        super()._check(modes)
        if (seen := self._config.get("in_channels")) != (width := PATCH**2 * self._model.latent_channels):
            raise self._refuse(f"in_channels is {seen}, and {width} of the transformer's are latents, which it sees")
        if self._config.get("conditioning_embedding_channels") is not None:
            reason = "it sees pixels (conditioning_embedding_channels), and those that see latents are served"
            raise self._refuse(reason)

    @property
    def _places(self) -> tuple[int, ...]:
        """As FluxTransformer2DModel has it."""
        places, first = list[int](), 0
        for name in ("num_layers", "num_single_layers"):
            blocks, samples = int(self._model.config[name]), int(self._config[name])
            interval = -(-blocks // samples) if samples else 0
            places += [first + number // interval if interval else NOTHING for number in range(blocks)]
            first += samples
        return tuple(places)

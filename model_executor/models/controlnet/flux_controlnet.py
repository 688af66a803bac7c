"""FluxControlNet: ControlNets of FLUX.1 dev and schnell, as InstantX and Shakker-Labs publish them, Union too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from model_executor.kernels.linear_groups import AnyGroup
from model_executor.kernels.operators import chosen_operators
from model_executor.kernels.ragged import Packing, gather, together
from model_executor.models.base import PrimeRow, Row
from model_executor.models.controlnet.controlnet import ControlNet, Shown
from model_executor.models.controlnet.residuals import NOTHING, Residuals
from model_executor.models.transformer.blocks import Modulation, RowSource
from model_executor.models.transformer.denoiser import select
from model_executor.models.transformer.flux_transformer import FluxTransformer
from model_executor.patches.batch_patches import Where

ALIKE = ("in_channels", "joint_attention_dim", "pooled_projection_dim", "num_attention_heads", "attention_head_dim")
"""Entries of the configuration that are those of the transformer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRow(Row):
    """A row as the ControlNet computes it: its picture is the tokens that it computes alone."""

    control: Tensor  # [tokens, latent width], latents of the control picture
    tokens: Tensor | None  # int64 [tokens], their numbers in the picture; None: all
    mode: int | None

    @classmethod
    def of(cls, row: Row, shown: Shown) -> ControlRow:
        """A row of the denoiser, for one control picture."""
        own: dict[str, Any] = {field.name: getattr(row, field.name) for field in fields(Row)}
        own |= {"latents": select(row.latents, row.active), "active": None, "box": None, "full_blocks": ()}
        control = select(shown.embedded[0], row.active)
        return cls(**(own | {"patches": ()}), control=control, tokens=row.active, mode=shown.mode)


class FluxControlTransformer(FluxTransformer):
    """The blocks of a `FluxControlNetModel`. Follows `diffusers/models/controlnets/controlnet_flux.py`."""

    def _make_output(self) -> tuple[Modulation, AnyGroup]:
        """A layer behind each block, of which the last one's is returned; there is no last norm."""
        module = self.module
        self._control_in = self._group(module.controlnet_x_embedder)
        layers = *module.controlnet_blocks, *module.controlnet_single_blocks
        self._outs = [self._group(layer) for layer in layers]
        return self._blocks[-1].modulation, self._outs[-1]

    def samples(self, rows: Sequence[ControlRow]) -> list[Tensor]:
        """What each block gives, [rows, tokens, hidden]. rows: of one request."""
        sources = [self._edit_source(row) for row in rows]
        stream = self._start(rows, sources)
        found: list[Tensor] = []
        for number, block in enumerate(self._blocks):
            block.run(stream, number)
            image = gather(stream.hidden, stream.packing.joint_image)
            found.append(self._outs[number](image, ()).view(len(rows), -1, image.shape[1]))
        return found

    def _embed(
        self, rows: Sequence[Row | PrimeRow], computed: Sequence[Tensor | None], packing: Packing, where: Where
    ) -> Tensor:
        mine = [row for row in rows if isinstance(row, ControlRow)]
        control = self._control_in(together([row.control for row in mine]), ())
        image = self._image_in(together([row.latents for row in mine]), ()) + control
        text = [self._text_in(row.prompt_embeds, ()) for row in mine]
        return packing.join(together([self._with_mode(*each) for each in zip(mine, text, strict=True)]), image)

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
        if row.tokens is None:
            return [table]
        return [table[: source.text_tokens], table[source.text_tokens :][row.tokens]]


class FluxControlNet(ControlNet):
    """A mask-aware step has it compute the active tokens alone, which attend to one another and to the text."""

    families: ClassVar[Collection[str]] = ("flux",)

    def _check(self, modes: Collection[int]) -> None:
        config, model = self._config, self._model
        for name in ALIKE:
            if name in config and config[name] != model.config.get(name):
                raise self._refuse(f"{name} is {config[name]}, and {model.config.get(name)} in the transformer")
        if config.get("conditioning_embedding_channels") is not None:
            reason = "it sees pixels (conditioning_embedding_channels), and those that see latents are served"
            raise self._refuse(reason)
        self._check_modes(modes, config.get("num_mode"))

    def put(self, module: nn.Module) -> None:
        chosen, device = self.checkpoint, self.checkpoint.device
        operators = chosen_operators(chosen.kernels, device, batch_invariant=chosen.batch_invariant)
        self._module = FluxControlTransformer(module, self._model.num_train_timesteps, operators, owns_module=True)

    def embed(self, control: Tensor, mode: int | None) -> tuple[Tensor, ...]:
        """control: [image tokens, latent width], which steps see as it is."""
        return (control,)

    def residuals(self, rows: Sequence[Row], shown: Sequence[Shown]) -> Residuals:
        steering = (each for each in shown if each.scale)
        sums = [[sample * each.scale for sample in self._samples(rows, each)] for each in steering]
        samples = [reduce(add, each) for each in zip(*sums, strict=True)]
        return Residuals(self._places, tuple(samples))

    def _samples(self, rows: Sequence[Row], shown: Shown) -> Sequence[Tensor]:
        transformer: FluxControlTransformer = self._module
        return transformer.samples([ControlRow.of(row, shown) for row in rows])

    @property
    def _places(self) -> tuple[int, ...]:
        """Blocks of the transformer share what is added, as FluxTransformer2DModel says: several in a row."""
        numbers, places, first = ("num_layers", "num_single_layers"), list[int](), 0
        for name in numbers:
            blocks, samples = int(self._model.config[name]), int(self._config[name])
            interval = -(-blocks // samples) if samples else 0
            places += [first + number // interval if interval else NOTHING for number in range(blocks)]
            first += samples
        return tuple(places)

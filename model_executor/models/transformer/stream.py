"""Stream: the state of a batch between the blocks of a transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_executor.kernels.attention import Attention, Projected
from model_executor.kernels.cpu_kernels import can_norm
from model_executor.kernels.operators import Operators
from model_executor.kernels.ragged import Packing, Span, together
from model_executor.kernels.residual import Residual
from model_executor.kernels.tile_blocks import TileBlock, TilePass
from model_executor.models.transformer.row_sources import RowSource
from model_executor.patches.batch_patches import BatchPatches, Where


@dataclass(slots=True)
class Stream:
    """The state of a batch as it passes through the blocks."""

    residual: Residual  # the hidden state: joint matrix [tokens, hidden], changed in place
    packing: Packing  # the rows of each request in it
    patches: BatchPatches  # of each request
    where: Where  # the rows that they change
    rotary: Tensor  # complex64 [tokens, 1, 1, head dim / 2]
    modulation: Callable[[int], Sequence[Tensor]]  # block number -> its parts, each [modulated spans, hidden]
    sources: Sequence[RowSource]  # one per request
    joint_attention: Attention  # over text and image together
    image_attention: Attention | None  # over the image tokens and their fillers alone, None if no block has it
    operators: Operators
    tiles: TilePass | None = None  # set by the first block that runs so

    @property
    def hidden(self) -> Tensor:
        """The hidden state, [tokens, hidden]."""
        return self.residual.hidden

    def attend(
        self, attention: Attention, number: int, page: int, *parts: Projected, out: Tensor | None = None
    ) -> list[Tensor]:
        """See `Operators.attend`."""
        return self.operators.attend(attention, number, page, parts, self.rotary, self.sources, out)

    def runs_with_tiles(self, block: TileBlock | None, number: int, page: int) -> bool:
        """Run a block, which is the `number`-th, by compiled functions. Returns whether there are any for it and for
        this batch: patches change no rows, and each request has one noise level."""
        where, packing = self.where, self.packing
        if block is None or block.kernels is not self.operators.kernels or where.text or where.image or where.joint:
            return False
        if packing.modulated_image is not packing.joint_image or not can_norm(self.hidden):
            return False
        parts = self.modulation(number)
        if parts[0].dtype != self.hidden.dtype:  # another rank has made the table
            return False
        if self.tiles is None:
            self.tiles = TilePass(block, self.joint_attention, self.hidden, self.rotary, packing)
        self.tiles.run(block, number, page, parts, self.sources)
        return True

    def keep(self, tokens: Sequence[Tensor | None], apart: Sequence[int] | None) -> None:
        """Drop all but these tokens of each request, numbered text before image; None keeps all. apart: of those that
        are left, as for `Packing.of`."""
        if all(kept is None for kept in tokens):
            return
        packing = self.packing
        hidden = self.residual.hidden
        rows = [_rows_of(span, kept, hidden.device) for span, kept in zip(packing.joint, tokens, strict=True)]
        chosen = together(rows)
        lengths = [stop - start for start, stop in packing.joint_text]
        images = [len(r) - length for r, length in zip(rows, lengths, strict=True)]
        self.packing = Packing.of(lengths, images, packing.fillers, apart)
        self.where = self.patches.on(self.packing)
        self.residual, self.rotary = self.operators.residual(hidden[chosen]), self.rotary[chosen]
        self.tiles = None


def _rows_of(span: Span, tokens: Tensor | None, device: torch.device) -> Tensor:
    """Rows of the joint matrix that hold these tokens of a request, None for all."""
    return torch.arange(*span, device=device) if tokens is None else span[0] + tokens

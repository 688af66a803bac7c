"""ControlRow: a row as a transformer's ControlNet computes it, for one control picture."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from model_executor.models.base import Row
from model_executor.models.controlnet.controlnet import Shown
from model_executor.models.transformer.denoiser import select


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRow(Row):
    """Its latents are those of the tokens that it computes alone."""

    control: Tensor  # [tokens, latent width], latents of the control picture
    tokens: Tensor | None  # int64 [tokens], their numbers in the picture; None: all
    mode: int | None
    text: slice  # the text tokens that are computed, of all with the mode's before them

    @classmethod
    def of(cls, row: Row, shown: Shown) -> ControlRow:
        """row: of the denoiser, of which the active tokens are computed."""
        own: dict[str, Any] = {field.name: getattr(row, field.name) for field in fields(Row)}
        own |= {"latents": select(row.latents, row.active), "active": None, "box": None}
        own |= {"full_blocks": (), "patches": ()}
        own |= {"control": select(shown.embedded[0], row.active), "tokens": row.active}
        return cls(**own, mode=shown.mode, text=slice(None))

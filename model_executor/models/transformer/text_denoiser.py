"""TextDenoiser: what the denoisers of models with prompts share: one embedding that all blocks are modulated by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.kernels.low_rank import Segments
from model_executor.models.transformer.denoiser import Conditions, Denoiser


class TextDenoiser(Denoiser):
    """Embeds noise level, pooled prompt and guidance with the module's own part for that."""

    embedding: ClassVar[str] = "time_text_embed"

    @abstractmethod
    def _embedding(self, embed: Any, sigma: Tensor, pooled_prompt_embeds: Tensor, guidance_scale: float) -> Tensor:
        """The embedding of one row, [1, hidden]. embed: the module's part `embedding`, with the row's patches."""

    def _conditioning(self, rows: Sequence[Conditions], where: Segments) -> Sequence[Tensor]:
        """One row at a time, because with few rows a product's rounding may depend on their number."""
        embeddings = [
            self._embedding(
                self.patches.whole.under(row.patches), row.sigma, row.pooled_prompt_embeds, row.guidance_scale
            )
            for row in rows
        ]
        return [F.silu(torch.cat(embeddings))] * len(self._modulations)

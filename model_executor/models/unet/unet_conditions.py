"""UnetConditions: what UNets and their ControlNets see of a row besides its picture: timestep, prompt, sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from model_executor.kernels.held import hold
from model_executor.models.base import PrimeRow, Row

CACHED_GRIDS = 32
"""Picture sizes whose `time_ids` are cached."""

SCORE, NEGATIVE_SCORE = 6.0, 2.5
"""The aesthetic scores that refiners are asked for, and led away from: the defaults of diffusers' pipelines."""


class UnetConditions:
    """num_train_timesteps: the scheduler's. token_size: pixels per token side. has_scores: an aesthetic score is seen
    instead of the target size. device: of the model."""

    def __init__(self, num_train_timesteps: int, token_size: int, device: torch.device, *, has_scores: bool) -> None:
        self._num_train_timesteps = num_train_timesteps
        self._token_size = token_size
        self._device = device
        self._has_scores = has_scores
        self._ids = lru_cache(maxsize=CACHED_GRIDS)(self._make_ids)

    def timesteps(self, rows: Sequence[Row | PrimeRow]) -> Tensor:
        """Timestep of each row, float32 [rows], clamped: the noisiest keyframe lies beyond the last timestep."""
        levels = torch.stack([row.sigma for row in rows])
        return (levels * self._num_train_timesteps).clamp(max=self._num_train_timesteps - 1)

    def added(self, rows: Sequence[Row | PrimeRow]) -> Mapping[str, Tensor]:
        """SDXL's additional inputs: the pooled prompt, and `time_ids`: original size, crop corner and target size, here
        those of an uncropped picture, or a score. Other UNets ignore them."""
        pooled = torch.stack([row.pooled_prompt_embeds for row in rows])
        return {
            "text_embeds": pooled,
            "time_ids": torch.stack([hold(self._ids(row.grid, _is_negative(row))) for row in rows]).to(pooled.dtype),
        }

    def _make_ids(self, grid: tuple[int, int], is_negative: bool) -> Tensor:
        """SDXL's time_ids for a picture size, made once on the device: copying them there would wait for a GPU."""
        size = [side * self._token_size for side in grid]
        score = NEGATIVE_SCORE if is_negative else SCORE
        return torch.tensor([*size, 0, 0, *([score] if self._has_scores else size)], device=self._device)


def texts(rows: Sequence[Row | PrimeRow]) -> Tensor:
    """Prompt embeddings, [rows, text tokens, width]."""
    return torch.stack([row.prompt_embeds for row in rows])


def _is_negative(row: Row | PrimeRow) -> bool:
    return isinstance(row, Row) and row.is_negative

"""A forward pass of diffusers' `UNet2DConditionModel`, whose convolutions want whole pictures of one size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from model_executor.models.base import Row
from model_executor.models.vae_family import pack, unpack

Numbers = Sequence[int]
"""Of rows, in the order they came."""


class Unet:
    """module: the UNet. num_train_timesteps: its scheduler's. token_size: pixels per token side.

    On a CPU only the rows of one request share a pass: of another number of rows a product may be rounded otherwise,
    and a picture must not depend on what shares its batches. It costs little: a pass of four rows took 0.85 of the time
    of four passes (320 channels, 16x16 latents, one core).
    """

    def __init__(self, module: Any, num_train_timesteps: int, token_size: int) -> None:
        self._module = module.to(memory_format=torch.channels_last)  # as the VAE's convolutions, and for their reasons
        self._is_shared = module.device.type != "cpu"  # a pass, by all rows of one size
        self._num_train_timesteps = num_train_timesteps
        self._token_size = token_size

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        """Prediction for each row, [image tokens, latent width]."""
        predictions: dict[int, Tensor] = {}  # row's number -> its prediction
        for numbers in _alike(rows, _size if self._is_shared else _request):
            images = self._run([rows[number] for number in numbers])
            predictions |= {number: pack(image[None]) for number, image in zip(numbers, images, strict=True)}
        return [predictions[number] for number in range(len(rows))]

    def _run(self, rows: Sequence[Row]) -> Tensor:
        """[rows, channels, height / 8, width / 8]. rows: of one size."""
        pictures = [unpack(torch.cat([row.latents, row.condition], dim=1), row.grid) for row in rows]
        timesteps = torch.stack([row.sigma for row in rows]) * self._num_train_timesteps
        prediction: Tensor = self._module(
            torch.cat(pictures),
            timesteps,
            encoder_hidden_states=torch.stack([row.prompt_embeds for row in rows]),
            added_cond_kwargs=self._added(rows),
            return_dict=False,
        )[0]
        return prediction

    def _added(self, rows: Sequence[Row]) -> Mapping[str, Tensor]:
        """What SDXL sees besides: the pooled prompt; and the picture's size before it was cut, the corner where it was
        cut and the size it was cut to, which are all of the picture as it is. Others have no pooled prompt."""
        pooled = torch.stack([row.pooled_prompt_embeds for row in rows])
        sizes = [[side * self._token_size for side in row.grid] for row in rows]
        ids = [[*size, 0, 0, *size] for size in sizes]
        return {"text_embeds": pooled, "time_ids": torch.tensor(ids, dtype=pooled.dtype, device=pooled.device)}


def _size(row: Row) -> Hashable:
    """Image tokens as (rows, columns), and text tokens."""
    return row.grid, len(row.prompt_embeds)


def _request(row: Row) -> Hashable:
    """Which one a row is of: the rows of one have the same latents."""
    return _size(row), id(row.latents)


def _alike(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> Collection[Numbers]:
    """The rows of each key."""
    numbers: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        numbers.setdefault(key(row), []).append(number)
    return numbers.values()

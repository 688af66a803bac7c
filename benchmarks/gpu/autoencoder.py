"""A VAE of random weights: pictures to latents and back."""

from __future__ import annotations

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call
from model_executor.models.vae import ImageVae


class Autoencoder:
    """config: diffusers'. side: of the picture, in pixels."""

    def __init__(self, bench: Bench, config: dict[str, Any], side: int) -> None:
        self._vae = ImageVae(bench.make(lambda: AutoencoderKL(**config)))
        self._picture = bench.draw(1, 3, side, side)
        self._latents: Tensor = self._vae.encode(self._picture)

    def encode(self) -> object:
        return self._vae.encode(self._picture)

    def decode(self) -> object:
        return self._vae.decode(self._latents)

    def decode_box(self, active: Tensor, side: int) -> Call:
        """The pixels around these of the picture's tokens, so many a side."""
        rows, columns = active // side, active % side
        box = tuple(int(edge) for edge in (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
        left, top, right, bottom = box
        return lambda: self._vae.decode_region(self._latents, (left, top, right, bottom), (side, side))

"""A VAE with random weights."""

from __future__ import annotations

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call
from model_executor.models.vae.vae import ImageVae


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
        """Decodes the pixels around the active tokens of a picture of side x side tokens."""
        rows, columns = active // side, active % side
        edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        left, top, right, bottom = (int(edge) for edge in edges)
        return lambda: self._vae.decode_region(self._latents, (left, top, right, bottom), (side, side))

"""A picture's latents as a map, and packed: one row per token, which holds the token's patch, channel by channel."""

from __future__ import annotations

from torch import Tensor

PATCH = 2
"""Default latent pixels per token side."""


def pack(x: Tensor, patch: int = PATCH) -> Tensor:
    """[1, channels, height, width] -> [height / patch * width / patch, channels * patch**2], as
    FluxPipeline._pack_latents."""
    _, channels, height, width = x.shape
    rows, columns = height // patch, width // patch
    x = x.reshape(channels, rows, patch, columns, patch).permute(1, 3, 0, 2, 4)
    return x.reshape(rows * columns, channels * patch**2)


def unpack(x: Tensor, grid: tuple[int, int], patch: int = PATCH) -> Tensor:
    """[rows * columns, channels * patch**2] -> [1, channels, rows * patch, columns * patch], as
    FluxPipeline._unpack_latents."""
    rows, columns = grid
    x = x.view(rows, columns, -1, patch, patch).permute(2, 0, 3, 1, 4)
    return x.reshape(1, -1, rows * patch, columns * patch)

"""The FLUX-Fill layout of a 256x256 picture: 16x16 image tokens, each a 2x2 patch of the 32x32 latents.

The same packing as `diffusers.FluxFillPipeline._pack_latents` and `prepare_mask_latents`, as free functions.
"""

import torch
from torch import Tensor

GRID = 16  # tokens per side
IMAGE_TOKENS = GRID * GRID
TEXT_TOKENS = 24
LATENTS = 64  # channels of a packed token: 16 latent channels of a 2x2 patch
MASK = 256  # channels of a packed mask token: its 16x16 pixels


def pack(latents: Tensor) -> Tensor:
    """[batch, channels, height, width] to [batch, height * width / 4, 4 * channels]."""
    b, c, h, w = latents.shape
    patches = latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(b, h // 2 * (w // 2), c * 4)


def unpack(tokens: Tensor, grid: int = GRID) -> Tensor:
    """[batch, grid * grid, 4 * channels] to [batch, channels, 2 * grid, 2 * grid]."""
    b, _, c = tokens.shape
    patches = tokens.view(b, grid, grid, c // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(b, c // 4, grid * 2, grid * 2)


def pack_mask(mask: Tensor) -> Tensor:
    """[batch, 256, 256] to [batch, 256 tokens, 256 pixels], in the order of the pipeline's two reshapes."""
    b, h, w = mask.shape
    cells = mask.view(b, h // 8, 8, w // 8, 8).permute(0, 2, 4, 1, 3).reshape(b, 64, h // 8, w // 8)
    return pack(cells)


def image_ids(grid: int = GRID) -> Tensor:
    """Position ids, [grid * grid, 3]: zero, row, column."""
    ids = torch.zeros(grid, grid, 3)
    ids[..., 1] = torch.arange(grid)[:, None]
    ids[..., 2] = torch.arange(grid)[None]
    return ids.view(-1, 3)

"""Small random segmenters, pictures, and how masks are compared."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.config import ModelConfig
from core.selection import Selection
from model_executor.checkpoint.loader import ONE_PART, ModelCheckpoint
from model_executor.segmenters.registry import make_segmenter
from model_executor.segmenters.segmenter import Found, Segmenter

SIZES = [(50, 70), (90, 40), (50, 70)]
"""Height and width of the pictures."""


def open_checkpoint(path: Path, dtype: Any = "float32") -> ModelCheckpoint:
    return ModelCheckpoint.open(ModelConfig(model=str(path), dtype=dtype, device="cpu"))


def load_segmenter(*paths: Path, dtype: Any = "float32") -> Segmenter:
    segmenter = make_segmenter([open_checkpoint(path, dtype) for path in paths])
    for part, checkpoint in segmenter.parts.items():
        segmenter.put(part, checkpoint.load(ONE_PART))
    return segmenter


def pictures() -> list[Tensor]:
    """uint8 [height, width, 3] of three sizes; smooth, so that resizing them keeps something."""
    generator = torch.Generator().manual_seed(1)
    coarse = [torch.rand(1, 3, 6, 6, generator=generator) for _ in SIZES]
    smooth = [torch.nn.functional.interpolate(c, s, mode="bicubic") for c, s in zip(coarse, SIZES, strict=True)]
    return [(each[0].clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 0).contiguous() for each in smooth]


@torch.inference_mode()
def find(segmenter: Segmenter, picture: Tensor, selection: Selection) -> Found:
    return segmenter.find(segmenter.look([picture])[0], selection)


def enlarged(masks: Tensor, picture: Tensor) -> Tensor:
    """Masks [number, maps, height, width] at the picture's size. `Sam2ImageProcessor.post_process_masks`, which needs
    torchvision, does no more by default, but for its threshold."""
    return torch.nn.functional.interpolate(masks, picture.shape[:2], mode="bilinear", align_corners=False)


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two masks, of 255."""
    assert one.shape == other.shape
    return (one - other).abs().max().item() * 255


@torch.inference_mode()
def check_batch(segmenter: Segmenter, selections: Iterable[Selection]) -> None:
    """A batched look finds what single looks find, and keeps no memory for the other pictures."""
    together = segmenter.look(pictures())
    alone = [segmenter.look([picture])[0] for picture in pictures()]
    for one, other, size in zip(together, alone, SIZES, strict=True):
        assert one.nbytes == sum(each.untyped_storage().nbytes() for each in one.tensors)
        for selection in selections:
            shares = segmenter.find(one, selection).shares
            assert difference(shares, segmenter.find(other, selection).shares) < 0.1
            assert (shares.shape, shares.dtype) == (torch.Size(size), torch.float32)


def check_bfloat16(*paths: Path, selections: Iterable[Selection]) -> None:
    """In bfloat16 the masks are nearly those in float32. The difference is bounded by its mean: random weights make
    masks that depend on everything."""
    exact, rounded = load_segmenter(*paths), load_segmenter(*paths, dtype="bfloat16")
    for selection in selections:
        found = find(rounded, pictures()[0], selection)
        assert found.shares.dtype == torch.float32
        assert (found.shares - find(exact, pictures()[0], selection).shares).abs().mean() < 0.05

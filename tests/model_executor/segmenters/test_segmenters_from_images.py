"""Segmenters whose modules come from the process that keeps weights find what others find."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from segmenter_rig import find, load_segmenter, pictures
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from core.selection import Point, Selection
from model_executor.checkpoint.loader import ONE_PART
from model_executor.segmenters import detector, sam3
from model_executor.segmenters.registry import make_segmenter
from model_executor.weights.image import read_image, write_image
from tools.random_segmenter_checkpoints import make_clipseg, make_grounding_dino, make_sam2, make_sam3

WORDS, POINT, BOX = Selection(words="a red hat"), Selection(points=(Point(0.3, 0.4),)), Selection(box=(0.2, 0, 0.7, 1))


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """What transformers knows of its classes is the same after a test as before."""
    before = dict(_CAN_RECORD_REGISTRY)
    yield
    _CAN_RECORD_REGISTRY.clear()
    dict.update(_CAN_RECORD_REGISTRY, before)


@pytest.mark.parametrize(
    ("makers", "selections"),
    [
        ([make_clipseg], [WORDS]),
        ([make_sam2], [POINT, BOX]),
        ([make_sam3], [WORDS, BOX]),
        ([make_grounding_dino, make_sam2], [WORDS, POINT]),
    ],
    ids=["clipseg", "sam2", "sam3", "dino"],
)
def test_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makers: Sequence[Any], selections: Sequence[Selection]
) -> None:
    monkeypatch.setattr(sam3, "THRESHOLD", 0.0)
    monkeypatch.setattr(detector, "THRESHOLD", 0.0)
    paths = [maker(tmp_path / str(i)) for i, maker in enumerate(makers)]
    expected = [find(load_segmenter(*paths), pictures()[0], selection) for selection in selections]
    there = load_segmenter(*paths)
    read = make_segmenter([*there.parts.values()])
    images = {part: write_image(checkpoint.load(ONE_PART)) for part, checkpoint in there.parts.items()}
    _CAN_RECORD_REGISTRY.clear()  # as in a process that has constructed no module
    for part, (fd, image) in images.items():
        read.put(part, read_image(fd, image)[0])
        os.close(fd)
    for selection, wanted in zip(selections, expected, strict=True):
        found = find(read, pictures()[0], selection)
        assert wanted.shares.max() > 0
        assert (found.shares - wanted.shares).abs().max() < 1e-4
        assert found.score == pytest.approx(wanted.score, abs=1e-4)


def test_a_module_that_has_run(tmp_path: Path) -> None:
    """Its recorders are taken off, too."""
    segmenter = load_segmenter(make_clipseg(tmp_path))
    wanted = find(segmenter, pictures()[0], WORDS).shares
    fd, image = write_image(segmenter._modules["segmenter"])
    segmenter.put("segmenter", read_image(fd, image)[0])
    os.close(fd)
    assert torch.allclose(find(segmenter, pictures()[0], WORDS).shares, wanted, atol=1e-4)

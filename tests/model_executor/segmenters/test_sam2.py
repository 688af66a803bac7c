"""SAM 2 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from segmenter_rig import (
    check_batch,
    check_bfloat16,
    difference,
    enlarged,
    find,
    load_segmenter,
    open_checkpoint,
    pictures,
)
from torch import Tensor
from transformers.models.sam2.modeling_sam2 import Sam2Model

from core.selection import Point, Selection
from model_executor.segmenters.sam2 import PROMPTS_AT_ONCE
from model_executor.segmenters.segmenter import Segmenter
from model_executor.segmenters.square import Square
from tools.random_segmenter_checkpoints import make_sam2

SIDE = 64
BOX = (0.2, 0.1, 0.7, 0.6)
POINTS = (Point(0.3, 0.4), Point(0.8, 0.9, adds=False), Point(0.1, 0.2))
EVERYTHING = [Selection(points=POINTS[:1]), Selection(points=POINTS), Selection(box=BOX)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sam2(tmp_path_factory.mktemp("sam2"))


@pytest.fixture(scope="module")
def segmenter(folder: Path) -> Segmenter:
    return load_segmenter(folder)


def prompt(selection: Selection) -> dict[str, Any]:
    """The model's inputs, in pixels of its square."""
    if selection.box is not None:
        return {"input_boxes": SIDE * torch.tensor([[selection.box]]), "multimask_output": False}
    places = [[point.x * SIDE, point.y * SIDE] for point in selection.points]
    return {
        "input_points": torch.tensor([[places]]),
        "input_labels": torch.tensor([[[int(point.adds) for point in selection.points]]]),
        "multimask_output": len(places) == 1,
    }


@torch.inference_mode()
def expected(folder: Path, picture: Tensor, selection: Selection) -> tuple[Tensor, float]:
    """transformers' shares [height, width] and score of its best mask."""
    pixels = Square.of_checkpoint(open_checkpoint(folder), SIDE).prepare([picture])
    out = Sam2Model.from_pretrained(folder).eval()(pixel_values=pixels, **prompt(selection))
    best = out.iou_scores[0, 0].argmax()
    return enlarged(out.pred_masks[0], picture)[0, best].sigmoid(), out.iou_scores[0, 0, best].item()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("selection", EVERYTHING, ids=["point", "points", "box"])
def test_masks(folder: Path, segmenter: Segmenter, selection: Selection, index: int) -> None:
    picture = pictures()[index]
    found, (shares, score) = find(segmenter, picture, selection), expected(folder, picture, selection)
    assert difference(found.shares, shares) < 0.1
    assert found.score == pytest.approx(score, abs=1e-5)
    assert shares.max() - shares.min() > 0.1


@pytest.mark.parametrize("selection", EVERYTHING, ids=["point", "points", "box"])
def test_masks_of_its_own_processor(folder: Path, segmenter: Segmenter, selection: Selection) -> None:
    pytest.importorskip("torchvision")
    from transformers import Sam2ImageProcessor, Sam2Processor

    picture = pictures()[1]
    height, width, _ = picture.shape
    processor = Sam2Processor(Sam2ImageProcessor.from_pretrained(folder))
    places: dict[str, Any] = {"input_boxes": None, "input_points": None, "input_labels": None}
    if selection.box is not None:
        left, top, right, bottom = selection.box
        places["input_boxes"] = [[[left * width, top * height, right * width, bottom * height]]]
    else:
        places["input_points"] = [[[[point.x * width, point.y * height] for point in selection.points]]]
        places["input_labels"] = [[[int(point.adds) for point in selection.points]]]
    inputs = processor(picture.permute(2, 0, 1), return_tensors="pt", **places)
    with torch.inference_mode():
        model = Sam2Model.from_pretrained(folder).eval()
        sizes = inputs.pop("original_sizes")
        out = model(**inputs, multimask_output=len(selection.points) == 1)
    masks = processor.post_process_masks(out.pred_masks, sizes, binarize=False)[0][0]
    found = find(segmenter, picture, selection)
    assert difference(found.shares, masks[out.iou_scores[0, 0].argmax()].sigmoid()) < 0.1


def test_pictures_are_prepared_as_by_its_own_processor(folder: Path) -> None:
    pytest.importorskip("torchvision")
    from transformers import Sam2ImageProcessor

    processor = Sam2ImageProcessor.from_pretrained(folder)
    channels_first = [picture.permute(2, 0, 1) for picture in pictures()]
    prepared = Square.of_checkpoint(open_checkpoint(folder), SIDE).prepare(pictures())
    assert torch.allclose(prepared, processor(channels_first, return_tensors="pt").pixel_values, atol=1e-5)


def test_a_model_for_videos(segmenter: Segmenter, tmp_path: Path) -> None:
    """Meta publishes SAM 2 as such; what is in a picture is found alike."""
    other = load_segmenter(make_sam2(tmp_path, is_video=True))
    for selection in EVERYTHING:
        one, two = (find(each, pictures()[0], selection).shares for each in (segmenter, other))
        assert torch.equal(one, two)


def test_it_takes_no_words(segmenter: Segmenter) -> None:
    assert segmenter.takes == {"points", "box"}
    with pytest.raises(ValueError, match="Sam2 takes no words"):
        find(segmenter, pictures()[0], Selection(words="hat"))


def test_a_box_and_points(segmenter: Segmenter) -> None:
    """The box limits what is at points that add; what is at the others is left out of what fills it."""
    picture = pictures()[0]
    at_points = find(segmenter, picture, Selection(points=POINTS)).shares
    limited = find(segmenter, picture, Selection(points=POINTS, box=BOX)).shares
    assert torch.equal(limited[5:30, 14:49], at_points[5:30, 14:49])
    assert limited.count_nonzero() == 25 * 35
    filled = find(segmenter, picture, Selection(box=BOX)).shares
    target = find(segmenter, picture, Selection(points=(Point(0.8, 0.9),))).shares
    less = find(segmenter, picture, Selection(points=POINTS[1:2], box=BOX)).shares
    assert torch.equal(less, torch.minimum(filled, 1 - target))


def test_batches(segmenter: Segmenter) -> None:
    check_batch(segmenter, EVERYTHING)


def test_bfloat16(folder: Path) -> None:
    check_bfloat16(folder, selections=EVERYTHING)


@torch.inference_mode()
def test_many_points_that_are_left_out_are_those_of_each(tmp_path: Path) -> None:
    """More than the decoder takes at once."""
    segmenter = load_segmenter(make_sam2(tmp_path))
    seen = segmenter.look(pictures()[:1])[0]
    points = tuple(Point(0.05 + 0.09 * index, 0.5) for index in range(PROMPTS_AT_ONCE + 2))
    each = [segmenter.find(seen, Selection(points=(point,))).shares for point in points]
    box = segmenter.find(seen, Selection(box=(0.1, 0.1, 0.9, 0.9))).shares
    without = tuple(msgspec.structs.replace(point, adds=False) for point in points)
    found = segmenter.find(seen, Selection(box=(0.1, 0.1, 0.9, 0.9), points=without)).shares
    expected = torch.minimum(box, 1 - torch.stack(each).amax(dim=0))
    assert difference(found, expected) < 0.1

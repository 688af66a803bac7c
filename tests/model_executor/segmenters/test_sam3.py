"""SAM 3 against transformers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

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
from transformers import CLIPTokenizer
from transformers.models.sam3.modeling_sam3 import Sam3Model
from transformers.models.sam3.processing_sam3 import Sam3Processor

from core.selection import Point, Selection
from model_executor.segmenters import sam3
from model_executor.segmenters.region import pool_region
from model_executor.segmenters.segmenter import Segmenter
from model_executor.segmenters.square import Square
from tools.random_segmenter_checkpoints import LENGTH, make_sam3

BOX = (0.2, 0.1, 0.7, 0.6)
EVERYTHING = [Selection(words="a red hat"), Selection(box=BOX), Selection(words="a red hat", box=BOX)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sam3(tmp_path_factory.mktemp("sam3"))


@pytest.fixture(scope="module")
def segmenter(folder: Path) -> Segmenter:
    return load_segmenter(folder)


@torch.inference_mode()
def outputs(folder: Path, picture: Tensor, words: str, **prompt: Tensor) -> Any:
    """What transformers' model makes of words and a picture."""
    pixels = Square.of_checkpoint(open_checkpoint(folder), 64).prepare([picture])
    options = {"padding": "max_length", "max_length": LENGTH, "truncation": True, "return_tensors": "pt"}
    tokens = CLIPTokenizer.from_pretrained(folder)(words, **options)
    return Sam3Model.from_pretrained(folder).eval()(pixel_values=pixels, **tokens, **prompt)


def scores_of(out: Any) -> Tensor:
    scores: Tensor = out.pred_logits[0].sigmoid() * out.presence_logits[0].sigmoid()
    return scores


def middle_of(scores: Tensor) -> float:
    """A threshold that half of the instances are above. Scores of random weights are all about the same."""
    ordered = scores.sort().values
    return (ordered[5] + ordered[6]).item() / 2


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("words", ["a red hat", "everything that is worn by anybody in this picture"])
def test_words(folder: Path, segmenter: Segmenter, words: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The union of all instances, as `Sam3ImageProcessor.post_process_instance_segmentation`, which needs torchvision,
    has them before its threshold for masks."""
    picture = pictures()[index]
    out = outputs(folder, picture, words)
    scores = scores_of(out)
    monkeypatch.setattr(sam3, "THRESHOLD", middle_of(scores))
    found = find(segmenter, picture, Selection(words=words))
    shares = enlarged(out.pred_masks.sigmoid(), picture)[0][scores > sam3.THRESHOLD]
    assert len(shares) == 6
    assert difference(found.shares, shares.amax(dim=0)) < 0.1
    assert found.score == pytest.approx(scores.max().item(), abs=1e-5)


def test_the_threshold_is_the_default_of_transformers() -> None:
    parameters = inspect.signature(Sam3Processor.post_process_instance_segmentation).parameters
    assert parameters["threshold"].default == sam3.THRESHOLD


def test_words_with_its_own_processor(folder: Path, segmenter: Segmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns masks at a threshold, so several are compared."""
    pytest.importorskip("torchvision")
    from transformers import Sam3ImageProcessor

    picture = pictures()[1]
    processor = Sam3Processor(Sam3ImageProcessor.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder))
    inputs = processor(picture.permute(2, 0, 1), text="a red hat", return_tensors="pt")
    sizes = inputs.pop("original_sizes").tolist()
    with torch.inference_mode():
        out = Sam3Model.from_pretrained(folder).eval()(**inputs)
    monkeypatch.setattr(sam3, "THRESHOLD", middle_of(scores_of(out)))
    found = find(segmenter, picture, Selection(words="a red hat"))
    for threshold in (0.2, 0.35, 0.5, 0.65, 0.8):
        options = {"threshold": sam3.THRESHOLD, "mask_threshold": threshold, "target_sizes": sizes}
        there = processor.post_process_instance_segmentation(out, **options)[0]
        clear = (found.shares - threshold).abs() > 1e-4
        assert torch.equal((found.shares > threshold)[clear], there["masks"].amax(dim=0).bool()[clear])
        assert found.score == pytest.approx(there["scores"].max().item(), abs=1e-5)


def test_words_that_are_not_there(segmenter: Segmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sam3, "THRESHOLD", 1.0)
    for selection in EVERYTHING:
        found = find(segmenter, pictures()[0], selection)
        assert (found.shares.max().item(), found.score) == (0.0, 0.0)


def test_words_in_a_box(segmenter: Segmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sam3, "THRESHOLD", 0.0)
    picture = pictures()[0]
    everywhere, inside = (find(segmenter, picture, EVERYTHING[i]).shares for i in (0, 2))
    assert torch.equal(inside[5:30, 14:49], everywhere[5:30, 14:49])
    assert inside.count_nonzero() == 25 * 35


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("box", [BOX, (0.0, 0.0, 1.0, 1.0), (0.9, 0.5, 0.98, 0.52)])
def test_a_box(
    folder: Path,
    segmenter: Segmenter,
    box: tuple[float, float, float, float],
    index: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The instance that overlaps the box most, of all that are like what is in it."""
    pytest.importorskip("torchvision")
    from transformers import Sam3ImageProcessor

    picture = pictures()[index]
    height, width, _ = picture.shape
    processor = Sam3Processor(Sam3ImageProcessor.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder))
    corners = [box[0] * width, box[1] * height, box[2] * width, box[3] * height]
    inputs = processor(picture.permute(2, 0, 1), input_boxes=[[corners]], return_tensors="pt")
    sizes = inputs.pop("original_sizes").tolist()
    with torch.inference_mode():
        out = Sam3Model.from_pretrained(folder).eval()(**inputs)
    monkeypatch.setattr(sam3, "THRESHOLD", middle_of(scores_of(out)))
    there = processor.post_process_instance_segmentation(out, sam3.THRESHOLD, target_sizes=sizes)[0]
    overlaps = sam3._overlaps(there["boxes"], torch.tensor([corners]))
    best = overlaps.argmax()
    found = find(segmenter, picture, Selection(box=box))
    if not overlaps.any():
        assert (found.shares.max().item(), found.score) == (0.0, 0.0)
        return
    close = (found.shares - 0.5).abs() < 1e-4
    assert torch.equal((found.shares > 0.5)[~close], there["masks"][best].bool()[~close])
    assert found.score == pytest.approx(there["scores"][best].item(), abs=1e-5)


def test_a_box_finds_something(segmenter: Segmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sam3, "THRESHOLD", 0.0)
    picture = pictures()[0]
    one, other = (find(segmenter, picture, Selection(box=box)) for box in (BOX, (0.6, 0.5, 0.9, 0.9)))
    assert min(one.score, other.score) > 0
    assert difference(one.shares, other.shares) > 10


def test_regions_of_a_plane() -> None:
    """Of features that grow evenly, a bin's mean is that of its samples' places."""
    features = torch.arange(8.0).expand(1, 1, 6, 8) + 10 * torch.arange(6.0)[:, None]
    pooled = pool_region(features, torch.tensor([0.5, 0.5, 0.5, 0.5]), 2)
    assert torch.allclose(pooled, torch.tensor([[[[25.5, 27.5], [40.5, 42.5]]]]), atol=1e-4)


@pytest.mark.parametrize("box", [(0.5, 0.5, 0.5, 0.5), (0.3, 0.7, 0.61, 0.13), (0.5, 0.5, 1.0, 1.0), (0.2, 0.4, 0, 0)])
def test_regions_are_torchvisions(box: tuple[float, float, float, float]) -> None:
    ops = pytest.importorskip("torchvision.ops")
    features = torch.randn(1, 5, 9, 12, generator=torch.Generator().manual_seed(0))
    x, y, width, height = box
    scaled = torch.tensor([[x - width / 2, y - height / 2, x + width / 2, y + height / 2]]) * torch.tensor([12, 9] * 2)
    assert torch.allclose(pool_region(features, torch.tensor(box), 3), ops.roi_align(features, [scaled], 3), atol=1e-5)


def test_pictures_are_prepared_as_by_its_own_processor(folder: Path) -> None:
    pytest.importorskip("torchvision")
    from transformers import Sam3ImageProcessor

    processor = Sam3ImageProcessor.from_pretrained(folder)
    channels_first = [picture.permute(2, 0, 1) for picture in pictures()]
    prepared = Square.of_checkpoint(open_checkpoint(folder), 64).prepare(pictures())
    assert torch.allclose(prepared, processor(channels_first, return_tensors="pt").pixel_values, atol=1e-5)


def test_a_model_for_videos(segmenter: Segmenter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta publishes SAM 3 as such; what is in a picture is found alike."""
    monkeypatch.setattr(sam3, "THRESHOLD", 0.0)
    other = load_segmenter(make_sam3(tmp_path, is_video=True))
    for selection in EVERYTHING:
        one, two = (find(each, pictures()[0], selection).shares for each in (segmenter, other))
        assert difference(one, two) < 0.1


def test_it_takes_no_points(segmenter: Segmenter) -> None:
    assert segmenter.takes == {"words", "box"}
    with pytest.raises(ValueError, match="Sam3 takes no points"):
        find(segmenter, pictures()[0], Selection(points=(Point(0.5, 0.5),)))


def test_batches(segmenter: Segmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sam3, "THRESHOLD", 0.0)
    check_batch(segmenter, EVERYTHING)


def test_bfloat16(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sam3, "THRESHOLD", 0.0)
    check_bfloat16(folder, selections=EVERYTHING)

"""Grounding DINO with SAM 2 against transformers."""

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
from transformers import BertTokenizer
from transformers.models.grounding_dino.image_processing_pil_grounding_dino import GroundingDinoImageProcessorPil
from transformers.models.grounding_dino.modeling_grounding_dino import GroundingDinoForObjectDetection
from transformers.models.grounding_dino.processing_grounding_dino import GroundingDinoProcessor
from transformers.models.mm_grounding_dino.modeling_mm_grounding_dino import MMGroundingDinoForObjectDetection
from transformers.models.sam2.modeling_sam2 import Sam2Model

from core.selection import Point, Selection
from model_executor.segmenters import detector, grounded_sam
from model_executor.segmenters.segmenter import Segmenter
from model_executor.segmenters.square import Square
from tools.random_segmenter_checkpoints import make_grounding_dino, make_sam2

WORDS = "a red hat"
EVERYTHING = [Selection(words=WORDS), Selection(points=(Point(0.3, 0.4),)), Selection(box=(0.2, 0.1, 0.7, 0.6))]


@pytest.fixture(scope="module")
def sam2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sam2(tmp_path_factory.mktemp("sam2"), seed=3)


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_grounding_dino(tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="module")
def mm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_grounding_dino(tmp_path_factory.mktemp("mm"), is_mm=True)


@pytest.fixture(scope="module")
def segmenter(dino: Path, sam2: Path) -> Segmenter:
    return load_segmenter(dino, sam2)


class Processor(GroundingDinoProcessor):  # type: ignore[misc]
    """Grounding DINO's processor with an image processor that needs no torchvision."""

    def __init__(self, folder: Path) -> None:
        self.image_processor = GroundingDinoImageProcessorPil.from_pretrained(folder)
        self.tokenizer = BertTokenizer.from_pretrained(folder)


@torch.inference_mode()
def detected(folder: Path, picture: Tensor, words: str, threshold: float) -> dict[str, Any]:
    """transformers' boxes in pixels, and their scores."""
    processor = Processor(folder)
    is_mm = "mm-grounding-dino" in (folder / "config.json").read_text()
    model = (MMGroundingDinoForObjectDetection if is_mm else GroundingDinoForObjectDetection).from_pretrained(folder)
    text = processor._preprocess_input_text([[words]])
    tokens = processor.tokenizer(text, return_tensors="pt")
    pixels = processor.image_processor(picture.numpy(), input_data_format="channels_last", return_tensors="pt")
    out = model.eval()(**tokens, **pixels)
    options = {"threshold": threshold, "target_sizes": [tuple(picture.shape[:2])]}
    results: list[dict[str, Any]] = processor.post_process_grounded_object_detection(out, tokens.input_ids, **options)
    return results[0]


def half_of_them(folder: Path, picture: Tensor, words: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The boxes and scores of `detected`, at a threshold that half of the queries are above, from now on. Scores of
    random weights are all about the same."""
    scores = detected(folder, picture, words, 0.0)["scores"].sort().values
    threshold = (scores[5] + scores[6]).item() / 2
    monkeypatch.setattr(detector, "THRESHOLD", threshold)
    found = detected(folder, picture, words, threshold)
    assert len(found["boxes"]) == 6
    return found


@torch.inference_mode()
def masks_of(folder: Path, picture: Tensor, boxes: Tensor) -> Tensor:
    """transformers' shares of each box, in pixels: [boxes, height, width]."""
    height, width, _ = picture.shape
    square = Square.of_checkpoint(open_checkpoint(folder), 64)
    scaled = boxes * torch.tensor([64 / width, 64 / height] * 2)
    model = Sam2Model.from_pretrained(folder).eval()
    out = model(pixel_values=square.prepare([picture]), input_boxes=scaled[None], multimask_output=False)
    return enlarged(out.pred_masks[0], picture)[:, 0].sigmoid()


@pytest.mark.parametrize(("index", "words"), [(0, WORDS), (1, WORDS), (0, "a blue coat, and a cat with a tail")])
def test_words(
    dino: Path, sam2: Path, segmenter: Segmenter, index: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_words(segmenter, dino, sam2, pictures()[index], words, monkeypatch)


def test_words_with_mmdetections_kind(mm: Path, sam2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints in the other order."""
    check_words(load_segmenter(sam2, mm), mm, sam2, pictures()[1], WORDS, monkeypatch)


def check_words(
    segmenter: Segmenter, dino: Path, sam2: Path, picture: Tensor, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of transformers' boxes are found, and the union of their masks."""
    there = half_of_them(dino, picture, words, monkeypatch)
    found = find(segmenter, picture, Selection(words=words))
    assert difference(found.shares, masks_of(sam2, picture, there["boxes"]).amax(dim=0)) < 0.1
    assert found.score == pytest.approx(there["scores"].max().item(), abs=1e-5)


def test_the_threshold_is_the_default_of_transformers() -> None:
    parameters = inspect.signature(GroundingDinoProcessor.post_process_grounded_object_detection).parameters
    assert parameters["threshold"].default == detector.THRESHOLD


def test_more_boxes_than_are_decoded_at_once(segmenter: Segmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = pictures()[0]
    monkeypatch.setattr(detector, "THRESHOLD", 0.0)
    together = find(segmenter, picture, EVERYTHING[0]).shares
    monkeypatch.setattr(grounded_sam, "PROMPTS_AT_ONCE", 1)
    assert difference(find(segmenter, picture, EVERYTHING[0]).shares, together) < 0.1


def test_words_that_are_not_there(segmenter: Segmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "THRESHOLD", 1.0)
    found = find(segmenter, pictures()[0], EVERYTHING[0])
    assert (found.shares.max().item(), found.score) == (0.0, 0.0)


def test_more_words_than_the_model_reads(segmenter: Segmenter) -> None:
    found = find(segmenter, pictures()[0], Selection(words="quite a lot of words. " * 45))
    assert found.shares.isfinite().all()


@pytest.mark.parametrize(
    ("words", "prompt"), [("A red Hat ", "a red hat."), ("a cat. a dog.", "a cat. a dog."), ("", ".")]
)
def test_prompts(words: str, prompt: str) -> None:
    assert detector.as_prompt(words) == prompt


@pytest.mark.parametrize("selection", EVERYTHING[1:], ids=["point", "box"])
def test_points_and_boxes_are_sam2s(segmenter: Segmenter, sam2: Path, selection: Selection) -> None:
    found, alone = (find(each, pictures()[0], selection) for each in (segmenter, load_segmenter(sam2)))
    assert torch.equal(found.shares, alone.shares)


def test_words_and_points(segmenter: Segmenter) -> None:
    picture, point = pictures()[0], Point(0.3, 0.4)
    words, there = (find(segmenter, picture, selection).shares for selection in EVERYTHING[:2])
    both = find(segmenter, picture, Selection(words=WORDS, points=(point,))).shares
    assert torch.equal(both, torch.maximum(words, there))
    less = find(segmenter, picture, Selection(words=WORDS, points=(Point(0.3, 0.4, adds=False),))).shares
    assert torch.equal(less, torch.minimum(words, 1 - there))


def test_the_detector_stays_as_it_was(segmenter: Segmenter) -> None:
    module = segmenter._modules["detector"]
    before = dict(module.named_modules())
    find(segmenter, pictures()[0], EVERYTHING[0])
    assert {name: id(each) for name, each in module.named_modules()} == {
        name: id(each) for name, each in before.items()
    }


def test_batches(segmenter: Segmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pictures of different sizes, too."""
    monkeypatch.setattr(detector, "THRESHOLD", 0.0)
    check_batch(segmenter, EVERYTHING)


def test_bfloat16(dino: Path, sam2: Path) -> None:
    check_bfloat16(dino, sam2, selections=EVERYTHING)

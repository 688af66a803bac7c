"""CLIPSeg against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from segmenter_rig import check_batch, check_bfloat16, difference, find, load_segmenter, pictures
from torch import Tensor
from transformers import CLIPSegForImageSegmentation, CLIPSegProcessor, CLIPTokenizer
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from core.selection import Point, Selection
from model_executor.segmenters.segmenter import Segmenter
from tools.random_segmenter_checkpoints import make_clipseg

THINGS = ("shoes", "hat", "shirt", "hair")
EVERYTHING = [
    Selection(words="a red hat"),
    Selection(points=(Point(0.3, 0.4), Point(0.8, 0.9, adds=False))),
    Selection(box=(0.2, 0.1, 0.7, 0.6)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clipseg(tmp_path_factory.mktemp("clipseg"), things=THINGS)


@pytest.fixture(scope="module")
def segmenter(folder: Path) -> Segmenter:
    return load_segmenter(folder)


@torch.inference_mode()
def expected(folder: Path, picture: Tensor, *texts: str) -> Tensor:
    """transformers' shares of texts, [texts, height, width]."""
    processor = CLIPSegProcessor(ViTImageProcessorPil.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder))
    model = CLIPSegForImageSegmentation.from_pretrained(folder).eval()
    images = [picture.numpy()] * len(texts)
    inputs = processor(text=list(texts), images=images, padding=True, truncation=True, return_tensors="pt")
    logits = model(**inputs).logits.reshape(1, len(texts), 64, 64)
    shares: Tensor = torch.nn.functional.interpolate(logits, picture.shape[:2], mode="bilinear")[0].sigmoid()
    return shares


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("words", ["a red hat", "Shoes, and everything else that is on the floor", "?"])
def test_words(folder: Path, segmenter: Segmenter, words: str, index: int) -> None:
    """Also more of them than the model reads."""
    picture = pictures()[index]
    found, shares = find(segmenter, picture, Selection(words=words)), expected(folder, picture, words)[0]
    assert difference(found.shares, shares) < 0.1
    assert found.score == pytest.approx(shares.max().item(), abs=1e-4)
    assert shares.max() - shares.min() > 0.1  # what is compared is no plain grey


def meant(shares: Tensor) -> Tensor:
    """The thing that a point means, at each pixel: the first that is there, or else the likeliest."""
    is_there = shares >= 0.5
    return torch.where(is_there.any(dim=0), is_there.float().argmax(dim=0), shares.argmax(dim=0))


def test_a_point_means_the_first_thing_that_is_there(folder: Path, segmenter: Segmenter) -> None:
    picture = pictures()[0]
    shares = expected(folder, picture, *THINGS)
    things, chosen = meant(shares), set[int]()
    places = [(thing.item(), *(things == thing).nonzero()[3].tolist()) for thing in things.unique()]
    for best, y, x in places:
        chosen.add(best)
        found = find(segmenter, picture, Selection(points=(Point((x + 0.5) / 70, (y + 0.5) / 50),)))
        assert difference(found.shares, shares[best]) < 0.1
        assert found.score == pytest.approx(shares[best, y, x].item(), abs=1e-4)
    assert len(chosen) > 1


def test_points_are_joined_and_left_out(folder: Path, segmenter: Segmenter) -> None:
    picture = pictures()[0]
    shares = expected(folder, picture, *THINGS)
    winners = meant(shares)
    kinds = winners.unique().tolist()[:2]
    places = [(winners == kind).nonzero()[0].tolist() for kind in kinds]
    one, other = (Point((x + 0.5) / 70, (y + 0.5) / 50) for y, x in places)
    both = find(segmenter, picture, Selection(points=(one, other)))
    assert difference(both.shares, shares[kinds].amax(dim=0)) < 0.1
    less = find(segmenter, picture, Selection(points=(one, Point(other.x, other.y, adds=False))))
    assert difference(less.shares, torch.minimum(shares[kinds[0]], 1 - shares[kinds[1]])) < 0.1


def test_words_and_points(segmenter: Segmenter) -> None:
    picture, point = pictures()[0], Point(0.3, 0.4)
    words = find(segmenter, picture, Selection(words="coat")).shares
    there = find(segmenter, picture, Selection(points=(point,))).shares
    both = find(segmenter, picture, Selection(words="coat", points=(point,))).shares
    assert torch.equal(both, torch.maximum(words, there))
    less = find(segmenter, picture, Selection(words="coat", points=(Point(0.3, 0.4, adds=False),))).shares
    assert torch.equal(less, torch.minimum(words, 1 - there))


def test_a_box_means_the_thing_whose_bounding_box_it_is(folder: Path, segmenter: Segmenter) -> None:
    """The bounds are those of the mask before it is resized; here it has the model's size."""
    picture = torch.nn.functional.interpolate(pictures()[0].permute(2, 0, 1)[None], (64, 64))[0].permute(1, 2, 0)
    shares = expected(folder, picture.contiguous(), *THINGS)
    compared = 0
    for each in shares:
        rows, columns = (each >= 0.5).any(dim=1).nonzero(), (each >= 0.5).any(dim=0).nonzero()
        if not len(rows):
            continue
        box = (columns[0].item(), rows[0].item(), columns[-1].item() + 1, rows[-1].item() + 1)
        found = find(segmenter, picture.contiguous(), Selection(box=tuple(side / 64 for side in box)))  # type: ignore[arg-type]
        assert found.score == pytest.approx(1.0)
        alike = [other for other in shares if difference(found.shares, other) < 0.1]
        assert alike
        compared += 1
    assert compared


def test_a_box_of_no_thing(segmenter: Segmenter) -> None:
    seen = segmenter.look(pictures()[:1])[0]
    empty = (0.5, 0.5, 0.5, 0.5)
    found = segmenter.find(seen, Selection(box=empty))
    assert (found.shares.max().item(), found.score) == (0.0, 0.0)


def test_without_things_it_takes_words_alone(tmp_path: Path) -> None:
    segmenter = load_segmenter(make_clipseg(tmp_path))
    assert segmenter.takes == {"words"}
    with pytest.raises(ValueError, match="ClipSeg takes no points"):
        find(segmenter, pictures()[0], Selection(words="hat", points=(Point(0.5, 0.5),)))


def test_batches(segmenter: Segmenter) -> None:
    check_batch(segmenter, EVERYTHING)


def test_bfloat16(folder: Path) -> None:
    check_bfloat16(folder, selections=EVERYTHING)


def test_a_part_that_is_dropped_and_put_again(folder: Path) -> None:
    segmenter = load_segmenter(folder)
    before = find(segmenter, pictures()[0], EVERYTHING[0]).shares
    segmenter.drop("segmenter")
    with pytest.raises(KeyError):
        segmenter.look(pictures())
    segmenter.put("segmenter", segmenter.parts["segmenter"].load("segmenter"))
    assert torch.equal(find(segmenter, pictures()[0], EVERYTHING[0]).shares, before)


def test_a_picture_three_pixels_high(segmenter: Segmenter) -> None:
    """Its height is not mistaken for its channels."""
    assert find(segmenter, pictures()[0][:3], EVERYTHING[0]).shares.shape == (3, 70)

"""The segmenter in the repository: small, as transformers' CLIPSeg expects it, and good on held-out scenes."""

from __future__ import annotations

import json
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tools.train_embedded.examples import PERSON
from tools.train_embedded.scenes import render
from tools.train_segmenter.evaluate import evaluate, overlap
from tools.train_segmenter.segmenter import THRESHOLD, Segmenter
from tools.train_segmenter.things import covered

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "model_executor" / "embedded_segmenter"
BAR = 0.85  # mean intersection over union
SCENES = 12


@pytest.fixture(scope="module")
def segmenter() -> Segmenter:
    return Segmenter(FOLDER)


@pytest.fixture(scope="module")
def person() -> np.ndarray:
    return np.asarray(Image.open(ROOT / "examples" / "person.png"))


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= 3_000_000


def test_it_is_part_of_the_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["model_executor"]
    for path in FOLDER.iterdir():
        assert any(fnmatch(f"{FOLDER.name}/{path.name}", pattern) for pattern in data), path.name


def test_it_computes_in_float32_what_is_kept_in_half_precision() -> None:
    from safetensors.torch import load_file
    from transformers import CLIPSegForImageSegmentation

    kept = load_file(FOLDER / "model.safetensors")
    model = CLIPSegForImageSegmentation.from_pretrained(FOLDER)
    assert {tensor.dtype for tensor in kept.values()} == {torch.float16}
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert model.state_dict().keys() == kept.keys()


def test_it_is_good_on_held_out_scenes(segmenter: Segmenter) -> None:
    scores = evaluate(segmenter, final=True, number=SCENES)
    assert scores.mean >= BAR
    assert scores.mean_of_prompts >= BAR
    assert scores.not_found >= 0.8


def test_the_published_scores_are_above_the_bar() -> None:
    published = json.loads((FOLDER / "evaluation.json").read_text())
    assert published["scenes"] == 200
    assert min(published["mean_iou"], published["mean_iou_of_prompts"]) >= BAR


@pytest.mark.parametrize("text", ["shirt", "the green shirt", "Her Shirt"])
def test_it_finds_the_shirt_of_the_example(segmenter: Segmenter, person: np.ndarray, text: str) -> None:
    truth = covered(render(PERSON).parts(), "shirt", PERSON)
    assert overlap(segmenter.masks(person, [text])[0], truth) >= 0.9


@pytest.mark.parametrize("text", ["skirt", "the red hat", "a zebra"])
def test_an_absent_thing_has_an_empty_mask(segmenter: Segmenter, person: np.ndarray, text: str) -> None:
    assert segmenter.probabilities(person, [text]).max() < THRESHOLD


def test_it_runs_as_any_clipseg(segmenter: Segmenter, person: np.ndarray) -> None:
    from transformers import CLIPSegForImageSegmentation, CLIPSegProcessor

    texts = ["hair", "the person"]
    model, processor = CLIPSegForImageSegmentation.from_pretrained(FOLDER), CLIPSegProcessor.from_pretrained(FOLDER)
    inputs = processor(text=texts, images=[Image.fromarray(person)] * 2, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape == (2, 256, 256)
    assert np.allclose(logits.sigmoid(), segmenter.probabilities(person, texts), atol=1e-4)


def test_an_empty_text_and_a_long_one_are_accepted(segmenter: Segmenter, person: np.ndarray) -> None:
    assert segmenter.probabilities(person, ["", "裙子 😀 " + "a " * 200]).shape == (2, 256, 256)

"""Scenes are pure functions of their seeds, and masks cover the garments they are drawn for."""

import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from tools.train_embedded.captions import caption, noun_phrase
from tools.train_embedded.garments import KINDS, PATTERNS, Garment
from tools.train_embedded.masks import (
    FIRST,
    LARGEST,
    MORE_BOXES,
    SMALLEST,
    Mixture,
    box_mask,
    draw_edit,
    grown,
    silhouette_mask,
)
from tools.train_embedded.scenes import SIZE, draw_scene, render


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_draws_the_same_scene_twice(seed: int) -> None:
    first, second = render(draw_scene(seed)), render(draw_scene(seed))
    assert first.image.shape == (SIZE, SIZE, 3)
    assert np.array_equal(first.image, second.image)
    assert not np.array_equal(first.image, render(draw_scene(seed + 1)).image)


def test_swapping_a_garment_changes_only_what_it_covers() -> None:
    scene = draw_scene(7)
    other = "red" if scene.top.colour != "red" else "blue"
    swapped = scene.wearing(Garment(scene.top.kind, other, "dotted", scene.top.seed))
    before, after = render(scene), render(swapped)
    outside = ~silhouette_mask(before.silhouettes["top"], 3)
    assert np.array_equal(before.image[outside], after.image[outside])
    assert not np.array_equal(before.image[~outside], after.image[~outside])


@pytest.mark.parametrize("mixture", [FIRST, MORE_BOXES])
def test_masks_are_of_usable_size(mixture: Mixture) -> None:
    rng = random.Random(0)
    scene = draw_scene(11)
    drawn = render(scene)
    for _ in range(40):
        assert SMALLEST <= draw_edit(rng, scene, drawn, mixture).mask.mean() <= LARGEST


@pytest.mark.parametrize("reach", [0, 1, 4, 12])
def test_a_mask_grows_as_pillow_grows_it(reach: int) -> None:
    mask = np.random.default_rng(reach).random((60, 80)) < 0.01
    pillows = Image.fromarray(mask.astype(np.uint8) * 255).filter(ImageFilter.MaxFilter(2 * reach + 1))
    assert np.array_equal(grown(mask, reach), np.asarray(pillows) > 127)


@pytest.mark.parametrize("seed", range(3, 11))
def test_a_whole_box_holds_every_garment_of_its_slot(seed: int) -> None:
    scene = draw_scene(seed)
    for slot, worn in scene.garments().items():
        for kind in KINDS[slot]:
            drawn = render(scene.wearing(replace(worn, kind=kind)))
            outside = (drawn.silhouettes[slot] > 127) & ~box_mask(drawn.whole_boxes[slot])
            assert not outside.any(), (slot, kind)


@pytest.mark.parametrize(
    ("garment", "phrase"),
    [
        (Garment("shirt", "orange", "plain", 0), "an orange shirt"),
        (Garment("shirt", "red", "striped", 0), "a red striped shirt"),
        (Garment("trousers", "blue", "plain", 0), "blue trousers"),
    ],
)
def test_captions_have_the_right_article(garment: Garment, phrase: str) -> None:
    assert noun_phrase(garment) == phrase


def test_every_pattern_is_named_in_its_caption() -> None:
    for pattern in PATTERNS[1:]:
        assert pattern in caption((Garment("coat", "green", pattern, 0),), random.Random(1))

"""Mask prompts name what a scene shows, and their masks are empty for what it does not show."""

import random

import numpy as np
import pytest

from tools.train_embedded.garments import COLOURS, Garment
from tools.train_segmenter.pool import DrawnScene, Pool, draw
from tools.train_segmenter.prompts import Asked, Shares, draw_prompt, other_colours, phrase, words
from tools.train_segmenter.things import NOUNS, covered


@pytest.fixture(scope="module")
def drawn() -> DrawnScene:
    return draw(5_000_001)


def test_a_garment_is_asked_for_by_its_look() -> None:
    rng = random.Random(0)
    red = Garment("sweater", "red", "striped", 0)
    asked = {phrase(rng, "sweater", red) for _ in range(400)}
    assert {"her red sweater", "the striped sweater", "sweater", "jumper", "a pullover"} <= asked
    assert not any(colour in text.split() for text in asked for colour in COLOURS if colour != "red")


def test_an_article_fits_the_next_word() -> None:
    rng = random.Random(0)
    asked = {phrase(rng, "coat", Garment("coat", "orange", "plain", 0)) for _ in range(300)}
    assert "an orange coat" in asked
    assert not any(text.startswith(("a o", "an c", "an j")) for text in asked)


def test_what_is_there_has_a_mask(drawn: DrawnScene) -> None:
    rng, asked = random.Random(0), Asked.of(drawn.parts, drawn.scene)
    assert {"person", "background", "shoes", "headwear", "shirt", "trousers"} <= set(asked.seen)
    for _ in range(40):
        prompt = draw_prompt(rng, asked, Shares(0, 0, 0))
        named = [thing for thing in asked.seen if any(prompt.text.endswith(noun) for noun in NOUNS[thing])]
        assert any(np.array_equal(prompt.mask, covered(drawn.parts, thing, drawn.scene)) for thing in named)
        assert prompt.mask.any()


@pytest.mark.parametrize("shares", [Shares(1, 0, 0), Shares(0, 1, 0), Shares(0, 0, 1)])
def test_what_is_not_there_has_an_empty_mask(drawn: DrawnScene, shares: Shares) -> None:
    rng, asked = random.Random(0), Asked.of(drawn.parts, drawn.scene)
    assert not any(draw_prompt(rng, asked, shares).mask.any() for _ in range(20))


def test_absent_things_are_those_without_a_pixel(drawn: DrawnScene) -> None:
    asked = Asked.of(drawn.parts, drawn.scene)
    assert {"coat", "dress", "sweater", "skirt", "shorts"} <= set(asked.absent)
    assert not set(asked.absent) & set(asked.seen)


def test_another_colour_is_one_that_is_not_mistaken(drawn: DrawnScene) -> None:
    assert {"blue", "green", "black"} <= set(other_colours("red"))
    assert all(colour not in other_colours(colour) and len(other_colours(colour)) >= 4 for colour in COLOURS)


def test_every_word_of_a_prompt_is_in_the_vocabulary(drawn: DrawnScene) -> None:
    rng, known, asked = random.Random(0), set(words()), Asked.of(drawn.parts, drawn.scene)
    for _ in range(200):
        text = draw_prompt(rng, asked, Shares(0.3, 0.3, 0)).text
        assert set(text.split()) <= known


def test_a_batch_goes_with_its_pictures() -> None:
    """The masks of a picture's prompts are unions of what the pixels are said to show."""
    pool = Pool(5_000_000)
    for _ in range(3):
        pool.grow()
    batch = pool.batch(random.Random(0), pictures=2, prompts=5)
    assert (len(batch.texts), batch.masks.shape) == (10, (10, 256, 256))
    for i, mask in enumerate(batch.masks):
        shown = batch.shown[i // 5]
        assert not set(shown[mask].unique().tolist()) & set(shown[~mask].unique().tolist())
    assert any(mask.any() for mask in batch.masks)

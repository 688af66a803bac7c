"""The metrics tell right edits from wrong ones: the ground truth scores high, shuffled prompts score as chance does."""

from itertools import pairwise

import numpy as np
import pytest

from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases
from tools.train_embedded.garments import COLOURS, PALETTE
from tools.train_embedded.metrics import PatternClassifier, fit_patterns, lab, read_colour, score, shuffled


@pytest.fixture(scope="module")
def held_out() -> list[Case]:
    return cases(seeds.TUNING, 30)


@pytest.fixture(scope="module")
def classifier() -> PatternClassifier:
    return fit_patterns(cases(seeds.CLASSIFIER, 60))


def test_the_truth_scores_high(held_out: list[Case], classifier: PatternClassifier) -> None:
    scores = score([case.truth for case in held_out], held_out, classifier)
    assert scores.colour >= 0.93
    assert scores.pattern >= 0.9


def test_shuffled_prompts_score_as_chance(held_out: list[Case], classifier: PatternClassifier) -> None:
    runs = [score([c.truth for c in held_out], shuffled(held_out, seed), classifier) for seed in range(3)]
    assert np.mean([run.colour for run in runs]) <= 1 / 12 + 0.12
    assert np.mean([run.pattern for run in runs]) <= 1 / 5 + 0.15


def test_the_untouched_template_has_the_wrong_colour(held_out: list[Case], classifier: PatternClassifier) -> None:
    assert score([case.template for case in held_out], held_out, classifier).colour <= 0.1


@pytest.mark.parametrize("name", COLOURS)
def test_each_palette_colour_reads_as_itself(name: str) -> None:
    image = np.full((8, 8, 3), PALETTE[name], np.uint8)
    assert read_colour(image, np.ones((8, 8), bool)) == name


def test_lab_of_known_colours() -> None:
    assert np.allclose(lab(np.array([255, 255, 255])), [100, 0, 0], atol=0.01)
    assert np.allclose(lab(np.array([255, 0, 0])), [53.24, 80.09, 67.20], atol=0.05)


def test_seed_ranges_do_not_overlap() -> None:
    firsts = sorted(value for name, value in vars(seeds).items() if name.isupper() and value > 10_000)
    assert all(b - a >= 100_000 for a, b in pairwise(firsts))

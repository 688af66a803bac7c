"""The scores of what one sees: zero error for the ground truth, and each fault raises its own score."""

from dataclasses import replace

import numpy as np
import pytest

from tools.train_embedded import seeds
from tools.train_embedded.blemishes import Blemishes, blemishes, border_step
from tools.train_embedded.cases import Case, cases
from tools.train_embedded.scenes import Pixels, draw_scene, empty_room, hands, render, stage


@pytest.fixture(scope="module")
def held_out() -> list[Case]:
    return cases(seeds.TUNING + 70_000, 6, "whole_box")


@pytest.fixture(scope="module")
def of_truth(held_out: list[Case]) -> Blemishes:
    return blemishes([case.truth for case in held_out], held_out)


def brighter(case: Case, step: int) -> Pixels:
    """The ground truth with a rectangle that is brighter by `step`."""
    return np.clip(case.truth + case.mask[..., None] * np.int16(step), 0, 255).astype(np.uint8)


def test_the_truth_has_no_error_and_both_hands(of_truth: Blemishes) -> None:
    assert (of_truth.background, of_truth.tint, of_truth.hands) == (0, 0, 1)
    assert of_truth.hand_cases >= 2


def test_a_rectangle_is_an_error_and_a_step(held_out: list[Case], of_truth: Blemishes) -> None:
    seen = blemishes([brighter(case, 6) for case in held_out], held_out)
    assert 5 < seen.background <= 6
    assert 5 < seen.tint <= 6
    assert seen.border > of_truth.border + 2


def test_clothes_over_a_small_part_of_the_room_are_no_tint(held_out: list[Case]) -> None:
    def painted(case: Case) -> Pixels:
        image, (rows, columns) = case.truth.copy(), np.nonzero(case.mask)
        image[rows.min() : rows.min() + 20, columns.min() : columns.min() + 20] = (255, 0, 255)
        return image

    seen = blemishes([painted(case) for case in held_out], held_out)
    assert seen.background > 1
    assert seen.tint < 0.1


def test_painted_over_hands_overlap_less(held_out: list[Case]) -> None:
    def without_hands(case: Case) -> Pixels:
        return np.where((hands(case.scene) & case.mask)[..., None], case.truth[0, 0], case.truth)

    assert blemishes([without_hands(case) for case in held_out], held_out).hands < 0.7


def test_the_border_step_is_the_step(held_out: list[Case]) -> None:
    mask, grey = np.zeros((256, 256), bool), np.full((256, 256, 3), 100, np.uint8)
    mask[60:200, 40:220] = True
    room = np.ones_like(mask)
    assert border_step(grey, mask, room) == pytest.approx(0)
    grey[mask] = 103
    assert border_step(grey, mask, room) == pytest.approx(3)
    assert border_step(grey, mask, ~room) is None


def test_the_empty_room_is_the_scene_without_its_figure() -> None:
    scene = draw_scene(seeds.TUNING)
    room = (empty_room(scene) == render(scene).image).all(-1)
    assert room[:, :10].mean() > 0.9
    assert not room[hands(scene)].any()


def test_given_arms_move_the_hands() -> None:
    scene = draw_scene(seeds.TUNING)
    body = stage(scene)[2]
    shoulder, elbow, (x, y) = body.arms[0]
    same = replace(scene, arms=body.arms)
    moved = replace(scene, arms=((shoulder, elbow, (x, y - 40)), body.arms[1]))
    assert (render(same).image == render(scene).image).all()
    assert (hands(moved) != hands(scene)).any()

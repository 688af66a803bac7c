"""Scores of what one sees at a glance: a rectangle where the mask was, and hands that are smeared.

background  mean absolute error, of 255, of the masked pixels where the ground truth shows the empty room
tint        median instead of the mean, which is small if the room is right and clothes are painted over a part of it
border      mean step in brightness, of 255, from outside to inside the mask, where the ground truth shows the room
hands       intersection over union of the skin around the hands with the ground truth's

The ground truth has a border step of its own (its light has gradients, and furniture has edges), so both are published.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.train_embedded.cases import Case
from tools.train_embedded.masks import Mask, grown
from tools.train_embedded.metrics import lab, local_mean
from tools.train_embedded.scenes import Pixels, empty_room, hands

STRIP = 4  # pixels: depth of the strips compared on both sides of a mask's border
WINDOW = 4  # pixels: half the side of the window over which a strip's brightness is averaged
SMALLEST_SIDE = 8  # pixels of a strip that a window must hold
HAND_REACH = 8  # pixels around the hands in which skin is compared
SMALLEST_HANDS = 30  # pixels of hands under the mask for a case to count
SKIN_REACH = 14.0  # CIELAB distance up to which a pixel is skin: less than from light skin to most walls


@dataclass(frozen=True)
class Blemishes:
    """Means over the cases that have background, a border on background, or hands under the mask."""

    background: float  # of 255
    tint: float  # of 255
    border: float  # of 255
    hands: float  # 0..1
    hand_cases: int


def blemishes(images: Sequence[Pixels], asked: Sequence[Case]) -> Blemishes:
    """Scores of `images`, one for each case of `asked`."""
    errors, tints, steps, overlaps = [], [], [], []
    for image, case in zip(images, asked, strict=True):
        room = (case.truth == empty_room(case.scene)).all(-1)
        inside = room & case.mask
        if inside.any():
            error = np.abs(image[inside].astype(np.float64) - case.truth[inside]).mean(-1)
            errors.append(float(error.mean()))
            tints.append(float(np.median(error)))
        step = border_step(image, case.mask, room)
        if step is not None:
            steps.append(step)
        overlap = hands_overlap(image, case)
        if overlap is not None:
            overlaps.append(overlap)
    return Blemishes(_mean(errors), _mean(tints), _mean(steps), _mean(overlaps), len(overlaps))


def border_step(image: Pixels, mask: Mask, room: Mask) -> float | None:
    """Mean over the mask's border of the difference, without its sign, between the brightness of the strips on both
    sides; None if the border does not pass over the room.
    """
    luminance = image.astype(np.float64) @ np.array([0.299, 0.587, 0.114])
    inner = mask & grown(~mask, STRIP) & room
    outer = ~mask & grown(mask, STRIP) & room
    enough = _enough(inner) & _enough(outer)
    border = mask & grown(~mask, 1) & room & enough
    if not border.any():
        return None
    sides = [local_mean(luminance, side.astype(np.float64), WINDOW)[border] for side in (inner, outer)]
    return float(np.abs(sides[0] - sides[1]).mean())


def hands_overlap(image: Pixels, case: Case) -> float | None:
    """None if too little of the hands lies under the mask."""
    shown = hands(case.scene) & case.mask
    if shown.sum() < SMALLEST_HANDS:
        return None
    skin = np.median(lab(case.truth[shown]), axis=0)
    near = grown(shown, HAND_REACH) & case.mask
    wanted, got = (near & (np.linalg.norm(lab(x) - skin, axis=-1) < SKIN_REACH) for x in (case.truth, image))
    return float((wanted & got).sum() / (wanted | got).sum())


def _enough(side: Mask) -> NDArray[np.bool_]:
    """Where the window around a pixel holds enough of a strip."""
    area = (2 * WINDOW) ** 2
    return local_mean(side.astype(np.float64), np.ones(side.shape), WINDOW) * area >= SMALLEST_SIDE


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0

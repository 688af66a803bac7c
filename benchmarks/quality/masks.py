"""Boxes of other sizes than garments have."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from tools.train_embedded.cases import Case
from tools.train_embedded.scenes import SIZE

TOKEN = 16  # pixels of its side


def part_of_box(case: Case, seed: int) -> Case:
    """The case with a box inside its mask's own, of 0.15 to 0.8 of its area."""
    dice = random.Random(seed)
    (top, bottom), (left, right) = _edges(case)
    side = dice.uniform(0.15, 0.8) ** 0.5
    height, width = max(TOKEN, int((bottom - top) * side)), max(TOKEN, int((right - left) * side))
    y, x = dice.randint(top, max(top, bottom - height)), dice.randint(left, max(left, right - width))
    return _with_box(case, x, y, width, height)


def box_anywhere(case: Case, seed: int) -> Case:
    """The case with a box of 0.02 to 0.55 of the picture."""
    dice = random.Random(seed + 7)
    share, aspect = dice.uniform(0.02, 0.55), dice.uniform(0.6, 1.6)
    height, width = (min(SIZE, int(side**0.5 * SIZE)) for side in (share / aspect, share * aspect))
    y, x = dice.randint(0, SIZE - height), dice.randint(0, SIZE - width)
    return _with_box(case, x, y, width, height)


def box_in_the_middle(case: Case, seed: int) -> Case:
    """The case with a box about the middle of its mask's own, of 5 to 9 tokens high and wide."""
    dice = random.Random(seed + 13)
    height, width = (dice.randint(5, 9) * TOKEN - TOKEN for _ in range(2))  # the margin adds a token
    y, x = ((first + end - 1 - side) // 2 for (first, end), side in zip(_edges(case), (height, width), strict=True))
    return _with_box(case, min(max(0, x), SIZE - width), min(max(0, y), SIZE - height), width, height)


def _edges(case: Case) -> list[tuple[int, int]]:
    """First and end of the mask's rows and of its columns."""
    return [(int(lines[0]), int(lines[-1]) + 1) for lines in (np.flatnonzero(case.mask.any(axis)) for axis in (1, 0))]


def _with_box(case: Case, x: int, y: int, width: int, height: int) -> Case:
    mask = np.zeros_like(case.mask)
    mask[y : y + height, x : x + width] = True
    return replace(case, mask=mask)

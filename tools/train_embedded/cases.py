"""Held-out edits for evaluation: a template, a mask, a prompt, and the render that is the ground truth."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Literal

from tools.train_embedded.captions import noun_phrase
from tools.train_embedded.garments import COLOURS, KINDS, PATTERNS, Garment, Slot
from tools.train_embedded.masks import LARGEST, Mask, box_mask, silhouette_mask
from tools.train_embedded.scenes import Pixels, Render, Scene, draw_scene, render

MaskKind = Literal["silhouette", "box", "whole_box"]
SMALLEST = 0.02  # share of the picture; smaller garments show too few repeats of a pattern
GROW = 3  # pixels by which silhouettes are grown, to cover the old garment's edge


@dataclass(frozen=True)
class Case:
    """One edit to score."""

    template: Pixels  # [256, 256, 3]
    mask: Mask  # [256, 256]
    silhouette: Mask  # [256, 256]: pixels of `garment` in `truth` under the mask
    garment: Garment  # that the prompt asks for
    truth: Pixels  # [256, 256, 3]: the same scene drawn with `garment`
    scene: Scene  # of `truth`

    @property
    def prompt(self) -> str:
        return noun_phrase(self.garment)


def cases(
    first_seed: int, number: int, masks: MaskKind = "silhouette", patterns: Sequence[str] = PATTERNS
) -> list[Case]:
    """Edits of the first `number` usable scenes from `first_seed` on, with colours and patterns in equal shares."""
    return list(islice(_cases(first_seed, masks, patterns), number))


def _cases(first_seed: int, masks: MaskKind, patterns: Sequence[str]) -> Iterator[Case]:
    done = 0
    for seed in count(first_seed):
        case = _case(seed, COLOURS[done % len(COLOURS)], patterns[done % len(patterns)], masks)
        if case is not None:
            done += 1
            yield case


def _case(seed: int, colour: str, pattern: str, masks: MaskKind) -> Case | None:
    """The edit of one scene; None if its garment already has the colour, or if too little of it is visible."""
    rng, scene = random.Random(seed), draw_scene(seed)
    worn = scene.garments()
    slot: Slot = rng.choice([name for name in ("top", "top", "bottom") if name in worn])
    old = worn[slot]
    if old.colour == colour:
        return None
    kind = old.kind if masks == "silhouette" else rng.choice(_kinds_fitting(scene, slot))
    garment = replace(old, kind=kind, colour=colour, pattern=pattern)
    before, after = render(scene), render(scene.wearing(garment))
    mask = _mask(before, slot, masks)
    silhouette = (after.silhouettes[slot] > 127) & mask
    if not SMALLEST <= mask.mean() <= LARGEST or silhouette.mean() < SMALLEST / 2:
        return None
    return Case(before.image, mask, silhouette, garment, after.image, scene.wearing(garment))


def _kinds_fitting(scene: Scene, slot: Slot) -> tuple[str, ...]:
    """The kinds that fit the other garments: a dress is only worn without a bottom."""
    if slot != "top":
        return KINDS[slot]
    return ("dress",) if scene.bottom is None else tuple(kind for kind in KINDS["top"] if kind != "dress")


def _mask(before: Render, slot: Slot, masks: MaskKind) -> Mask:
    match masks:
        case "silhouette":
            return silhouette_mask(before.silhouettes[slot], GROW)
        case "box":
            return box_mask(before.boxes[slot])
        case "whole_box":
            return box_mask(before.whole_boxes[slot])

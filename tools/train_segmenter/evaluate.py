"""Stage `evaluate`: intersection over union on held-out scenes, by thing, and how often an absent thing is not found.

Every thing that is there is asked for once in each scene, in words drawn from the scene's seed; so is every one that
is absent, and the garments in another colour than theirs.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.train_embedded import seeds
from tools.train_segmenter.pool import DrawnScene, draw
from tools.train_segmenter.prompts import Asked, any_look, phrase, phrase_in_other_colour
from tools.train_segmenter.segmenter import THRESHOLD, Segmenter
from tools.train_segmenter.things import garment_of

CLASSES = {
    "person": ("person",),
    "background": ("background",),
    "hair": ("hair",),
    "hat": ("headwear", "cap", "beanie"),
    "shoes": ("shoes",),
    "shirt": ("shirt",),
    "coat": ("coat",),
    "dress": ("dress",),
    "sweater": ("sweater",),
    "trousers": ("trousers",),
    "skirt": ("skirt",),
    "shorts": ("shorts",),
}
"""Class of the published figures -> its things."""


@dataclass(frozen=True)
class Scores:
    """Means over prompts; a class's are those of its things."""

    scenes: int
    overlap: dict[str, float]  # class -> mean intersection over union of the prompts for what is there
    prompts: dict[str, int]  # class -> their number
    mean: float  # over the classes
    mean_of_prompts: float
    not_found: float  # share of the prompts for an absent thing whose every pixel is below the threshold
    other_colour_not_found: float  # the same of prompts for a garment in another colour than its own


@dataclass(frozen=True)
class Question:
    text: str
    mask: NDArray[np.bool_]  # [256, 256]
    kind: str  # a class, "absent" or "other colour"


def questions(drawn: DrawnScene, rng: random.Random) -> Iterator[Question]:
    """Everything that is asked of one scene."""
    scene, asked = drawn.scene, Asked.of(drawn.parts, drawn.scene)
    for name, things in CLASSES.items():
        for thing in things:
            if thing not in asked.seen:
                continue
            worn = garment_of(thing, scene)
            yield Question(phrase(rng, thing, worn), asked.seen[thing], name)
            if worn is not None:
                yield Question(phrase_in_other_colour(rng, thing, scene), asked.nothing, "other colour")
    for thing in asked.absent:
        yield Question(phrase(rng, thing, any_look(rng, thing)), asked.nothing, "absent")


def overlap(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """Intersection over union; 1 of two empty masks."""
    union = (a | b).sum()
    return float((a & b).sum() / union) if union else 1.0


def evaluate(segmenter: Segmenter, final: bool, number: int = seeds.TEST_CASES) -> Scores:
    """Scores on the first `number` test scenes, or tuning scenes unless final."""
    first = seeds.SEGMENTER_TEST if final else seeds.TUNING
    by_kind = defaultdict[str, list[float]](list)  # kind of question -> scores
    for seed in range(first, first + number):
        drawn = draw(seed)
        asked = list(questions(drawn, random.Random(seed)))
        shown = segmenter.probabilities(drawn.image, [question.text for question in asked])
        for question, probability in zip(asked, shown, strict=True):
            by_kind[question.kind].append(overlap(question.mask, probability > THRESHOLD))
    overlaps = {name: by_kind[name] for name in CLASSES if by_kind[name]}
    return Scores(
        scenes=number,
        overlap={name: _mean(values) for name, values in overlaps.items()},
        prompts={name: len(values) for name, values in overlaps.items()},
        mean=_mean([_mean(values) for values in overlaps.values()]),
        mean_of_prompts=_mean([value for values in overlaps.values() for value in values]),
        not_found=_mean(by_kind["absent"]),
        other_colour_not_found=_mean(by_kind["other colour"]),
    )


def summary(scores: Scores) -> str:
    lines = [f"{name:<12}{value:.3f}  {scores.prompts[name]} prompts" for name, value in scores.overlap.items()]
    lines.append(f"mean of classes {scores.mean:.4f}, of prompts {scores.mean_of_prompts:.4f}")
    lines.append(f"absent, not found {scores.not_found:.3f}; in another colour {scores.other_colour_not_found:.3f}")
    return "\n".join(lines)


def write(scores: Scores, path: Path) -> None:
    numbers: dict[str, Any] = {
        "scenes": scores.scenes,
        "first_seed": seeds.SEGMENTER_TEST,
        "threshold": THRESHOLD,
        "mean_iou": round(scores.mean, 4),
        "mean_iou_of_prompts": round(scores.mean_of_prompts, 4),
        "iou": {name: round(value, 4) for name, value in scores.overlap.items()},
        "prompts": scores.prompts,
        "absent_not_found": round(scores.not_found, 4),
        "other_colour_not_found": round(scores.other_colour_not_found, 4),
    }
    path.write_text(json.dumps(numbers, indent=1) + "\n")


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0

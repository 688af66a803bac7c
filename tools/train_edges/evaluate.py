"""Stage `evaluate`: held-out edits under box masks, without control and with the edges of the ground truth.

agreement  F1 of the edges under the mask with the control picture's, of which each may be REACH pixels from one of the
           other's; of a result without control it says how far edges agree by chance and by what the prompt says
colour, pattern, shape  as in the embedded model's evaluation
like exact  SSIM in the mask's box of the mask-aware edit with control to the exact one
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from core.config import ControlNetConfig, ModelConfig
from core.sampling_params import SamplingParams
from entrypoints import ControlPicture, Edit, ImageEngine
from entrypoints.calibration.similarity import ssim_in_box
from tools.train_edges.edges import CANNY, Lines, control_picture, edges, grown
from tools.train_edges.sheet import Shown, write_sheet
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, MaskKind, cases
from tools.train_embedded.evaluate import STEPS
from tools.train_embedded.masks import Mask
from tools.train_embedded.metrics import score
from tools.train_embedded.scenes import Pixels

REACH = 2  # pixels
SEARCHED = Lines(CANNY.low / 2, CANNY.high / 2)  # edges of results, which are softer than drawn ones
MASKS: tuple[MaskKind, ...] = ("box", "whole_box")
APART = 20_000  # between the first seeds of two kinds of masks
INTO_TUNING = 90_000  # from the first tuning scene on: others are for the embedded model
SHOWN = 4  # rows of the sheet of each kind of masks


@dataclass(frozen=True)
class Scores:
    """Means over the cases."""

    cases: int
    steps: int
    agreement: float
    agreement_without: float
    agreement_truth: float
    colour: float
    colour_without: float
    pattern: float
    pattern_without: float
    shape: float
    shape_without: float
    like_exact_mean: float
    like_exact_p10: float


@dataclass(frozen=True)
class Edited:
    """The pictures of all cases."""

    without: list[Pixels]
    exact: list[Pixels]
    mask_aware: list[Pixels]


def held_out(final: bool, number: int) -> list[Case]:
    """Cases with each kind of masks in equal shares."""
    first = seeds.EDGES_TEST if final else seeds.TUNING + INTO_TUNING
    every = [cases(first + APART * i, number // len(MASKS), kind) for i, kind in enumerate(MASKS)]
    return [case for each in every for case in each]


def agreement(image: Pixels, case: Case) -> float:
    """0..1; see above."""
    found, wanted = edges(image, SEARCHED) & case.mask, edges(case.truth, CANNY) & case.mask
    precision, recall = near(found, edges(case.truth, SEARCHED)), near(wanted, edges(image, SEARCHED))
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def near(points: Mask, others: Mask) -> float:
    """Share of the points that have one of the others at most REACH pixels away; 1 without points."""
    return float(grown(others, 2 * REACH + 1)[points].mean()) if points.any() else 1.0


def run(engine: ImageEngine, asked: Sequence[Case]) -> Edited:
    """Edit i has seed i."""
    plain = [
        Edit(prompt=case.prompt, image=case.template, mask_image=case.mask.astype(np.uint8) * 255) for case in asked
    ]
    controlled = [
        Edit(
            prompt=edit.prompt,
            image=edit.image,
            mask_image=edit.mask_image,
            controls=[ControlPicture(control_picture(case.truth))],
        )
        for edit, case in zip(plain, asked, strict=True)
    ]
    return Edited(
        without=_pictures(engine, plain, mask_aware=False),
        exact=_pictures(engine, controlled, mask_aware=False),
        mask_aware=_pictures(engine, controlled, mask_aware=True),
    )


def _pictures(engine: ImageEngine, edits: Sequence[Edit], *, mask_aware: bool) -> list[Pixels]:
    params = [SamplingParams(seed=seed, num_inference_steps=STEPS, mask_aware=mask_aware) for seed in range(len(edits))]
    results = engine.generate(edits, params, use_tqdm=False)
    for result in results:
        if result.error is not None:
            raise result.error
    return [np.asarray(result.images[0]) for result in results]


def mean_agreement(images: Sequence[Pixels], asked: Sequence[Case]) -> float:
    return float(np.mean([agreement(image, case) for image, case in zip(images, asked, strict=True)]))


def likeness(edited: Edited, asked: Sequence[Case]) -> list[float]:
    """How alike the mask-aware edit of each case is to the exact one."""
    pairs = zip(edited.exact, edited.mask_aware, asked, strict=True)
    return [ssim_in_box(exact, aware, case.mask) for exact, aware, case in pairs]


def judge(asked: Sequence[Case], edited: Edited) -> Scores:
    before, after, alike = score(edited.without, asked), score(edited.exact, asked), likeness(edited, asked)
    return Scores(
        cases=len(asked),
        steps=STEPS,
        agreement=mean_agreement(edited.exact, asked),
        agreement_without=mean_agreement(edited.without, asked),
        agreement_truth=mean_agreement([case.truth for case in asked], asked),
        colour=after.colour,
        colour_without=before.colour,
        pattern=after.pattern,
        pattern_without=before.pattern,
        shape=after.shape,
        shape_without=before.shape,
        like_exact_mean=float(np.mean(alike)),
        like_exact_p10=float(np.percentile(alike, 10)),
    )


def evaluate(folder: Path, sheet: Path, *, final: bool, number: int) -> None:
    """Score the checkpoint in `folder` through the serving engine on the test scenes if `final`, else on the tuning
    scenes, and draw the sheet. The scores of the test scenes are written to evaluation.json beside the weights."""
    asked = held_out(final, number)
    model = ModelConfig(controlnets=(ControlNetConfig("edges", str(folder.resolve())),), dtype="float32")
    with ImageEngine(models=[model]) as engine:
        edited = run(engine, asked)
    scores = judge(asked, edited)
    text = json.dumps(asdict(scores), indent=2)
    print(text, flush=True)
    if final:
        (folder / "evaluation.json").write_text(text + "\n")
    shown = [i for i in range(len(asked)) if i % (number // len(MASKS)) < SHOWN]
    rows = [Shown(asked[i], control_picture(asked[i].truth), edited.without[i], edited.exact[i]) for i in shown]
    write_sheet(rows, sheet)

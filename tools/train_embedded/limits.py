"""Stage `limits`: what keeps the scores down, on the tuning scenes. It scores, beside each other, the ground truth,
another scene that fits what the mask leaves to be seen, both through the VAE, and the model sampled in several ways.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxFillPipeline

from tools.train_embedded import seeds
from tools.train_embedded.blemishes import blemishes
from tools.train_embedded.cases import Case, MaskKind, cases
from tools.train_embedded.evaluate import run_cases
from tools.train_embedded.export import load_pipeline
from tools.train_embedded.metrics import score
from tools.train_embedded.sampling import decoded, encoded, with_guidance
from tools.train_embedded.scenes import Body, Pixels, Scene, draw_arm, render, stage, whole_boxes

REDRAWS = 40  # poses of an arm tried to find one that fits
BOX_FITS = 2.0  # pixels by which the box may differ
PICTURE_FITS = 0.2  # mean error of 255 outside the mask

Answer = Callable[[Sequence[Case]], list[Pixels]]


def line(name: str, kind: MaskKind, images: Sequence[Pixels], asked: Sequence[Case]) -> str:
    """All scores of one way to answer the cases."""
    scores, seen = score(images, asked), blemishes(images, asked)
    return (
        f"{name:>22} {kind:>10}: colour {scores.colour:.3f} pattern {scores.pattern:.3f} shape {scores.shape:.3f}, "
        f"background {seen.background:.2f} tint {seen.tint:.2f} border {seen.border:.2f} "
        f"hands {seen.hands:.3f} ({seen.hand_cases})"
    )


def truths(asked: Sequence[Case]) -> list[Pixels]:
    return [case.truth for case in asked]


def through_vae(pipeline: FluxFillPipeline, way: Answer) -> Answer:
    """Another way's pictures as the VAE can show them: what the best denoiser reaches with it."""

    @torch.no_grad()
    def answer(asked: Sequence[Case]) -> list[Pixels]:
        images: list[Pixels] = []
        for case, image in zip(asked, way(asked), strict=True):
            picture = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 127.5 - 1
            new = decoded(pipeline, encoded(pipeline, picture))[0]
            images.append(np.where(case.mask[..., None], new, case.template))
        return images

    return answer


def redrawn(case: Case, rng: random.Random) -> Pixels:
    """Another scene that fits the case: each arm is drawn again until the box and what the mask leaves to be seen are
    the same, and the garment is cut again. Its scores are those of a perfect model that draws one of the possible
    pictures. An arm of which no other pose fits stays as it is.
    """
    body = stage(case.scene)[2]
    cut = case.scene.wearing(replace(case.garment, seed=case.garment.seed + 1))
    arms = list(body.arms)
    for i, side in enumerate((-1, 1)):
        for _ in range(REDRAWS):
            tried = [*arms[:i], draw_arm(rng, side, body.arms[i][0], body.height), *arms[i + 1 :]]
            if _fits(replace(cut, arms=tuple(tried)), body, case):
                arms = tried
                break
    return np.where(case.mask[..., None], render(replace(cut, arms=tuple(arms))).image, case.template)


def others(asked: Sequence[Case]) -> list[Pixels]:
    return [redrawn(case, random.Random(i)) for i, case in enumerate(asked)]


def _fits(scene: Scene, body: Body, case: Case) -> bool:
    """Whether a scene with other arms has the case's box and, outside the mask, its picture."""
    assert scene.arms is not None
    new, old = (np.array(whole_boxes(replace(body, arms=arms))["top"]) for arms in (scene.arms, body.arms))
    if case.garment.slot == "top" and np.abs(new - old).max() > BOX_FITS:
        return False
    image = render(scene).image
    return float(np.abs(image[~case.mask].astype(np.float64) - case.truth[~case.mask]).mean()) < PICTURE_FITS


def limits(folder: Path, number: int) -> None:
    """Print a table of the checkpoint in `folder`, on `number` plain garments under each kind of box.

    A guidance below 1 takes back a part of the guidance that was distilled into the weights: of the scale 2.5, 0.4
    leaves 1.
    """
    pipeline = load_pipeline(folder).to(torch.float32)
    ways: dict[str, Answer] = {
        "truth": truths,
        "another that fits": others,
        "truth through the VAE": through_vae(pipeline, truths),
        "another through it": through_vae(pipeline, others),
    }
    for steps, scale in ((8, 1.0), (8, 0.7), (8, 0.4), (50, 1.0)):
        ways[f"{steps} steps, guidance {scale}"] = partial(run_cases, with_guidance(pipeline, steps, scale))
    kinds: tuple[MaskKind, ...] = ("box", "whole_box")
    first = {"box": seeds.TUNING + 50_000, "whole_box": seeds.TUNING + 70_000}
    asked = {kind: cases(first[kind], number, kind, ("plain",)) for kind in kinds}
    for name, way in ways.items():
        for kind in kinds:
            print(line(name, kind, way(asked[kind]), asked[kind]), flush=True)

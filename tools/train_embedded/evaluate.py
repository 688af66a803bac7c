"""Stage `evaluate`: scores the checkpoint and the ground truth, for a JSON file next to the weights."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.train_embedded import seeds
from tools.train_embedded.blemishes import Blemishes, blemishes
from tools.train_embedded.cases import Case, MaskKind, cases
from tools.train_embedded.editing import EditBatch, with_pipeline
from tools.train_embedded.export import load_pipeline, weight_bytes
from tools.train_embedded.metrics import Scores, score, shuffled
from tools.train_embedded.scenes import Pixels
from tools.train_embedded.vae import held_out_images, load_vae, round_trip_psnr

STEPS = 8
SHUFFLES = 5
PSNR_IMAGES = 64
SHOWN = 4  # edits per kind of mask on the contact sheet: the first ones, not a selection
KINDS: tuple[MaskKind, ...] = ("silhouette", "box", "whole_box")


@dataclass(frozen=True)
class Report:
    """Scores on one set of cases. `share` is the model's score / the ground truth's."""

    model: Scores
    truth: Scores
    blemishes: Blemishes  # of the model's edits
    truth_blemishes: Blemishes  # of the ground truth: its own border step
    shuffled_colour: float  # the model's edits scored against permuted prompts
    shuffled_pattern: float
    truth_shuffled_colour: float
    truth_shuffled_pattern: float

    @property
    def share(self) -> dict[str, float]:
        return {
            "colour": self.model.colour / self.truth.colour,
            "pattern": self.model.pattern / self.truth.pattern,
            "shape": self.model.shape / self.truth.shape,
        }


def run_cases(edit: EditBatch, asked: Sequence[Case]) -> list[Pixels]:
    return edit(
        [case.template for case in asked],
        [case.mask for case in asked],
        [case.prompt for case in asked],
        list(range(len(asked))),
    )


def judge(edits: Sequence[Pixels], asked: Sequence[Case]) -> Report:
    truths = [case.truth for case in asked]
    dealt = [shuffled(asked, seed) for seed in range(SHUFFLES)]
    deaf = [score(edits, wrong) for wrong in dealt]
    deaf_truth = [score(truths, wrong) for wrong in dealt]
    return Report(
        model=score(edits, asked),
        truth=score(truths, asked),
        blemishes=blemishes(edits, asked),
        truth_blemishes=blemishes(truths, asked),
        shuffled_colour=float(np.mean([scores.colour for scores in deaf])),
        shuffled_pattern=float(np.mean([scores.pattern for scores in deaf])),
        truth_shuffled_colour=float(np.mean([scores.colour for scores in deaf_truth])),
        truth_shuffled_pattern=float(np.mean([scores.pattern for scores in deaf_truth])),
    )


@dataclass(frozen=True)
class Outcome:
    """The result of an evaluation: the numbers to publish, and the cases and edits of the contact sheet."""

    numbers: dict[str, Any]
    shown: tuple[list[Case], list[Pixels]]


def held_out_cases(final: bool, number: int) -> dict[MaskKind, list[Case]]:
    """`number` cases with silhouettes and half as many of each kind of box; of test scenes if `final`, else of tuning
    scenes.
    """
    tuning = {"silhouette": seeds.TUNING, "box": seeds.TUNING + 50_000, "whole_box": seeds.TUNING + 70_000}
    test = {"silhouette": seeds.TEST, "box": seeds.TEST_BOXES, "whole_box": seeds.TEST_WHOLE_BOXES}
    first = test if final else tuning
    return {kind: cases(first[kind], number if kind == "silhouette" else number // 2, kind) for kind in KINDS}


def evaluate(folder: Path, final: bool, edit: EditBatch | None = None, number: int = seeds.TEST_CASES) -> Outcome:
    """Score the checkpoint in `folder` on the test scenes if `final`, else on the tuning scenes.

    edit: used instead of diffusers' pipeline, such as a serving engine with the same checkpoint.
    """
    run = edit or with_pipeline(load_pipeline(folder), STEPS)
    asked = held_out_cases(final, number)
    vae, held_out = load_vae(folder / "vae"), held_out_images(PSNR_IMAGES)
    edits = {kind: run_cases(run, asked[kind]) for kind in KINDS}
    reports: dict[str, Report] = {kind: judge(edits[kind], asked[kind]) for kind in KINDS}
    numbers = {
        "scenes": "test" if final else "tuning",
        "steps": STEPS,
        "guidance": "none at run time",
        **{name: {**asdict(report), "share": report.share} for name, report in reports.items()},
        "vae_psnr_float32": round_trip_psnr(vae, held_out),
        "vae_psnr_bfloat16": round_trip_psnr(vae.to(torch.bfloat16), held_out),
        "weight_bytes": weight_bytes(folder),
    }
    shown = [(case, edit) for kind in KINDS for case, edit in list(zip(asked[kind], edits[kind], strict=True))[:SHOWN]]
    return Outcome(numbers, ([case for case, _ in shown], [edit for _, edit in shown]))


def summary(numbers: dict[str, Any]) -> str:
    lines = [f"{numbers['scenes']} scenes, {numbers['steps']} steps, VAE {numbers['vae_psnr_bfloat16']:.2f} dB"]
    for name in KINDS:
        report = numbers[name]
        lines += [
            f"{name:>10} {what:>7}: model {report['model'][what]:.3f}, truth {report['truth'][what]:.3f}, "
            f"share {report['share'][what]:.3f}"
            for what in ("colour", "pattern", "shape")
        ]
        lines += [
            f"{name:>10} {what:>10}: model {report['blemishes'][what]:.3f}, truth {report['truth_blemishes'][what]:.3f}"
            for what in ("background", "tint", "border", "hands")
        ]
        lines.append(f"{'':>10} shuffled: {report['shuffled_colour']:.3f} / {report['shuffled_pattern']:.3f}")
    return "\n".join(lines)


def write(numbers: dict[str, Any], path: Path) -> None:
    def rounded(value: Any) -> Any:
        match value:
            case dict():
                return {key: rounded(item) for key, item in value.items()}
            case float():
                return round(value, 4)
            case _:
                return value

    path.write_text(json.dumps(rounded(numbers), indent=1) + "\n")

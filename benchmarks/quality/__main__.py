"""How close mask-aware edits come to exact ones: held-out edits of drawn scenes, same seeds, through ImageEngine.

Prints Markdown (docs/quality.md holds a run) and writes the same numbers as JSON and the worst ten edits as a picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.quality.edits import (
    OTHER_SEEDS,
    Likeness,
    Machine,
    Setting,
    num_changed_outside,
    pixels,
    run_aware,
    run_exact,
)
from benchmarks.quality.masks import part_of_box
from benchmarks.quality.table import Row, measure_table, settings_around, shipped_setting, table_markdown
from benchmarks.serving.pipeline_loop import DTYPES
from core.config import EMBEDDED_MODEL
from core.model_info import ModelInfo
from entrypoints.calibration_search import describe_full_steps
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases
from tools.train_embedded.metrics import score
from tools.train_embedded.scenes import SIZE, Pixels
from tools.train_embedded.sheet import masked_view

MEAN_BAR, P10_BAR, POINTS_BAR = 0.98, 0.96, 1.0
WORST = 10
SCALE_EDITS = 48
"""Edits that are run with another seed: enough to see the scale."""
SCENES = {
    ("test", "silhouette"): seeds.TEST,
    ("test", "box"): seeds.TEST_BOXES,
    ("tuning", "silhouette"): seeds.TUNING,
    ("tuning", "box"): seeds.TUNING + 50_000,
}


@dataclass(frozen=True)
class Outcome:
    """The shipped default, but for --full-steps, at one number of steps. full_steps: None for what mask ratios say.
    other_seed: exact against exact with another seed, the scale, of the first SCALE_EDITS edits."""

    steps: int
    full_steps: int | None
    likeness: Likeness
    other_seed: Likeness
    exact_colour: float  # accuracy, 0..1
    exact_pattern: float
    num_changed_outside: int
    exact: list[Pixels]
    aware: list[Pixels]

    @property
    def is_within_bars(self) -> bool:
        like = self.likeness
        is_close = like.mean >= MEAN_BAR and like.p10 >= P10_BAR
        is_right = round(max(abs(like.colour), abs(like.pattern)), 3) <= POINTS_BAR
        return is_close and is_right and self.num_changed_outside == 0


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    machine = Machine(args.dtype, args.threads, args.priming_prompt, args.model)
    asked = _edits(args.scenes, args.masks, args.num_edits)
    outcomes, model = _measure_default(machine, asked, args.steps, args.full_steps)
    default = replace(shipped_setting(model), full_steps=args.full_steps[0])
    print(_heading(args, asked, model))
    for outcome in outcomes:
        print(_outcome_markdown(outcome), flush=True)
    worst = min(outcomes, key=lambda outcome: outcome.likeness.mean)
    _write_worst(asked, worst, args.sheet)
    rows = list(_measure_rows(machine, asked[: args.table_edits], outcomes, default))
    if rows:
        print(f"\nOne knob at a time, {args.table_edits} edits; times against the exact mode's:\n")
        print(table_markdown(rows, default), flush=True)
    args.json.write_text(json.dumps(_as_json(args, default, outcomes, rows), indent=1) + "\n")


def _edits(scenes: str, masks: str, number: int) -> list[Case]:
    if masks == "part":
        return [part_of_box(case, seed) for seed, case in enumerate(_edits(scenes, "box", number))]
    return cases(SCENES[scenes, masks], number, "box" if masks == "box" else "silhouette")


def _measure_default(
    machine: Machine, asked: Sequence[Case], steps: Sequence[int], full_steps: Sequence[int | None]
) -> tuple[list[Outcome], ModelInfo]:
    with machine.engine(Setting()) as engine:
        outcomes = []
        for number in steps:
            exact = run_exact(engine, asked, number)
            scaled = asked[:SCALE_EDITS]
            other = run_exact(engine, scaled, number, OTHER_SEEDS)
            scale, accuracy = Likeness.of(scaled, exact[: len(scaled)], other), score(exact, asked)
            for full in full_steps:
                aware = [pixels(result) for result in run_aware(engine, asked, number, Setting(full_steps=full))]
                outcomes.append(
                    Outcome(
                        steps=number,
                        full_steps=full,
                        likeness=Likeness.of(asked, exact, aware),
                        other_seed=scale,
                        exact_colour=accuracy.colour,
                        exact_pattern=accuracy.pattern,
                        num_changed_outside=num_changed_outside(asked, aware),
                        exact=exact,
                        aware=aware,
                    )
                )
        return outcomes, engine.model


def _measure_rows(
    machine: Machine, asked: Sequence[Case], outcomes: Sequence[Outcome], default: Setting
) -> Sequence[Row]:
    if not asked:
        return []
    exact = {outcome.steps: outcome.exact for outcome in outcomes}
    return list(measure_table(machine, asked, exact, settings_around(default)))


def _heading(args: argparse.Namespace, asked: Sequence[Case], model: ModelInfo) -> str:
    area = float(np.mean([case.mask.mean() for case in asked]))
    default, scheme = shipped_setting(model), model.page_scheme
    assert scheme is not None
    rules = [
        describe_full_steps(*((scheme.full_steps, scheme.full_steps_from) if full is None else (full, 0.0)))
        for full in args.full_steps
    ]
    return (
        f"{len(asked)} {args.scenes} edits, {args.masks} masks (mean area {area:.2f}), compute {args.dtype}; shipped"
        f" default: {default.keyframes} keyframes, {default.dtype} pages, margin {default.margin} px,"
        f" {'; '.join(rules)}" + (f", primed with {args.priming_prompt!r}" if args.priming_prompt else "")
    )


def _outcome_markdown(outcome: Outcome) -> str:
    like, other = outcome.likeness, outcome.other_seed
    deciles = " ".join(f"{value:.3f}" for value in like.deciles)
    verdict = "yes" if outcome.is_within_bars else "no"
    full = "" if outcome.full_steps is None else f", {outcome.full_steps} in full"
    return "\n".join(
        [
            f"\n{outcome.steps} steps{full}, mask-aware against exact with the same seed:\n",
            "| | mask-aware | another seed, exact |",
            "| --- | --- | --- |",
            f"| SSIM in the mask's box, mean / p10 | {like.mean:.4f} / {like.p10:.4f} | {other.mean:.4f} /"
            f" {other.p10:.4f} |",
            f"| SSIM of the whole picture, mean | {like.whole.mean():.4f} | {other.whole.mean():.4f} |",
            f"| colour accuracy, points from exact's {outcome.exact_colour:.1%} | {like.colour:+.1f} |"
            f" {other.colour:+.1f} |",
            f"| pattern accuracy, points from exact's {outcome.exact_pattern:.1%} | {like.pattern:+.1f} |"
            f" {other.pattern:+.1f} |",
            f"| pictures changed outside the mask | {outcome.num_changed_outside} | |",
            "",
            f"SSIM in the box, least, deciles, greatest: {deciles}",
            "",
            f"Within the bars (mean >= {MEAN_BAR}, p10 >= {P10_BAR}, accuracy within {POINTS_BAR:g} point, nothing"
            f" changed outside): {verdict}",
        ]
    )


def _write_worst(asked: Sequence[Case], outcome: Outcome, path: Path) -> None:
    """Input, mask, exact and mask-aware edit of those least alike, worst first."""
    order = np.argsort(outcome.likeness.in_box)[:WORST]
    caption, gap = 20, 6
    sheet = Image.new("RGB", (4 * (SIZE + gap) + gap, len(order) * (SIZE + caption + gap) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for place, i in enumerate(order):
        case, top = asked[i], gap + place * (SIZE + caption + gap)
        for column, picture in enumerate((case.template, masked_view(case), outcome.exact[i], outcome.aware[i])):
            sheet.paste(Image.fromarray(picture), (gap + column * (SIZE + gap), top))
        words = f"“{case.prompt}”   SSIM in box {outcome.likeness.in_box[i]:.3f}   input, mask, exact, mask-aware"
        draw.text((gap + 2, top + SIZE + 3), words, fill="black", font_size=14)
    sheet.save(path, optimize=True)


def _as_json(
    args: argparse.Namespace, default: Setting, outcomes: Sequence[Outcome], rows: Sequence[Row]
) -> dict[str, Any]:
    return {
        "benchmark": "quality",
        "scenes": args.scenes,
        "masks": args.masks,
        "dtype": args.dtype,
        "num_edits": args.num_edits,
        "default": asdict(default),
        "outcomes": [
            {
                "steps": outcome.steps,
                "full_steps": outcome.full_steps,
                "mask_aware": _likeness_json(outcome.likeness),
                "other_seed": _likeness_json(outcome.other_seed),
                "exact_colour": outcome.exact_colour,
                "exact_pattern": outcome.exact_pattern,
                "num_changed_outside": outcome.num_changed_outside,
                "is_within_bars": outcome.is_within_bars,
            }
            for outcome in outcomes
        ],
        "table_edits": args.table_edits,
        "table": [_row_json(row) for row in rows],
    }


def _likeness_json(like: Likeness) -> dict[str, Any]:
    return {
        "ssim_mean": round(like.mean, 5),
        "ssim_p10": round(like.p10, 5),
        "ssim_deciles": [round(value, 5) for value in like.deciles],
        "ssim_whole_mean": round(float(like.whole.mean()), 5),
        "colour_points": round(like.colour, 3),
        "pattern_points": round(like.pattern, 3),
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        **asdict(row.setting),
        "steps": row.steps,
        **_likeness_json(row.likeness),
        "active_ratio": round(row.active_ratio, 4),
        "denoise_ratio": round(row.denoise_ratio, 4),
        "edit_ratio": round(row.edit_ratio, 4),
        "page_bytes": row.page_bytes,
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num-edits", type=int, default=200, help="edits that judge the shipped default")
    parser.add_argument(
        "--table-edits", type=int, default=48, help="the first so many of them fill the table; 0 = none"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 28], help="denoising steps")
    parser.add_argument("--scenes", choices=("test", "tuning"), default="test", help="which held-out scenes")
    parser.add_argument(
        "--masks",
        choices=("silhouette", "box", "part"),
        default="silhouette",
        help="a garment's outline, its box or a box inside that",
    )
    parser.add_argument(
        "--full-steps", type=int, nargs="+", default=[None], help="of every edit, instead of what its mask ratio says"
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="a checkpoint of `tools.train_embedded`'s scenes")
    parser.add_argument("--priming-prompt", default="", help="prompt that templates are primed with")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type of both modes")
    parser.add_argument("--threads", type=int, default=0, help="torch threads of the worker; 0 = its own choice")
    parser.add_argument("--json", type=Path, default=Path("quality.json"), help="where the numbers go")
    parser.add_argument("--sheet", type=Path, default=Path("quality_worst.png"), help="where the worst ten go")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

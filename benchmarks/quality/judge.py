"""How close mask-aware edits come to exact ones: held-out edits of drawn scenes, same seeds, through ImageEngine.

Judges the settings that a server without flags uses, or those given here, against bars. An exact run with another seed
gives the scale.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.command import DTYPES
from benchmarks.quality.edits import (
    OTHER_SEEDS,
    Likeness,
    Machine,
    Setting,
    num_changed_outside,
    options,
    pictures,
    run_edits,
)
from benchmarks.quality.masks import part_of_box
from benchmarks.quality.sheet import write_sheet
from benchmarks.report import Row, print_report
from core.page_scheme import PageDtype
from core.step_schedule import StepScheduleName
from entrypoints import ImageEngine
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases
from tools.train_embedded.metrics import Scores, score
from tools.train_embedded.scenes import Pixels
from tools.train_embedded.sheet import masked_view

MEAN_BAR, P10_BAR, POINTS_BAR = 0.98, 0.96, 1.0
WORST = 10
SCALE_EDITS = 48  # edits that also run with another seed
SCENES = {
    ("test", "silhouette"): seeds.TEST,
    ("test", "box"): seeds.TEST_BOXES,
    ("tuning", "silhouette"): seeds.TUNING,
    ("tuning", "box"): seeds.TUNING + 50_000,
}
MASKS = ("silhouette", "box", "part")


@dataclass(frozen=True)
class Outcome:
    """Mask-aware edits with one number of steps.

    other_seed: exact edits with another seed, of the first SCALE_EDITS edits. accuracy: of the exact edits. active:
    mean share of tokens computed. page_bytes: of one template.
    """

    likeness: Likeness
    other_seed: Likeness
    accuracy: Scores
    num_changed_outside: int
    active: float
    page_bytes: int
    exact: list[Pixels]
    aware: list[Pixels]

    @property
    def is_within_bars(self) -> bool:
        like = self.likeness.figures
        is_close = like["mean"] >= MEAN_BAR and like["p10"] >= P10_BAR
        is_right = round(max(abs(like["colour"]), abs(like["pattern"])), 3) <= POINTS_BAR
        return is_close and is_right and self.num_changed_outside == 0

    @property
    def rows(self) -> list[Row]:
        """For people. In brackets: the scale."""
        mine, scale = self.likeness.figures, self.other_seed.figures
        deciles = " ".join(f"{value:.3f}" for value in np.percentile(self.likeness.in_box, range(0, 101, 10)))
        return [
            ("SSIM in the mask's box, mean / p10", f"{_ssim(mine)} ({_ssim(scale)})"),
            ("the same, least, deciles, greatest", deciles),
            ("SSIM of the whole picture, mean", f"{mine['whole']:.4f} ({scale['whole']:.4f})"),
            (f"colour, points from {self.accuracy.colour:.1%}", f"{mine['colour']:+.1f} ({scale['colour']:+.1f})"),
            (f"pattern, points from {self.accuracy.pattern:.1%}", f"{mine['pattern']:+.1f} ({scale['pattern']:+.1f})"),
            ("pictures changed outside the mask", str(self.num_changed_outside)),
            ("tokens computed, pages of a template", f"{self.active:.3f}, {self.page_bytes / 1e6:.1f} MB"),
            (f"mean >= {MEAN_BAR}, p10 >= {P10_BAR}, within {POINTS_BAR:g} point", _yes(self.is_within_bars)),
        ]

    @property
    def figures(self) -> dict[str, Any]:
        scale = {f"other_seed_{name}": value for name, value in self.other_seed.figures.items()}
        facts = {"num_changed_outside": self.num_changed_outside, "page_bytes": self.page_bytes}
        return self.likeness.figures | scale | facts | {"active_ratio": self.active, "within": self.is_within_bars}


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    machine = Machine(args.dtype, args.threads, args.priming_prompt, args.model)
    asked = edits_of(args.scenes, args.masks, args.num_edits)
    setting = Setting(args.keyframes, args.cache_dtype, args.margin, args.full_steps, args.step_schedule)
    outcomes = []
    with replace(machine, dtype=args.exact_dtype or args.dtype).engine(setting) as engine:
        exact = {steps: _exact(engine, asked, steps) for steps in args.steps}
    with machine.engine(setting) as engine:
        for steps in args.steps:
            outcomes.append(_measure(engine, asked, steps, setting, exact[steps]))
            full = "full steps by mask ratio" if setting.full_steps is None else f"{setting.full_steps} in full"
            scheduled = f"{steps} steps, {setting.step_schedule} schedule, {full}"
            dtypes = args.dtype if args.exact_dtype in (None, args.dtype) else f"{args.dtype} ({args.exact_dtype})"
            title = f"{len(asked)} {args.scenes} edits, {args.masks} masks, {scheduled}, {dtypes}"
            result = {"benchmark": "quality", "steps": steps, "masks": args.masks, "num_edits": len(asked)}
            print_report(title, outcomes[-1].rows, result | outcomes[-1].figures, args.output)
    if args.sheet is not None:
        _write_worst(asked, min(outcomes, key=lambda outcome: outcome.likeness.figures["mean"]), args.sheet)


def edits_of(scenes: str, masks: str, number: int) -> list[Case]:
    if masks == "part":
        return [part_of_box(case, seed) for seed, case in enumerate(edits_of(scenes, "box", number))]
    return cases(SCENES[scenes, masks], number, "box" if masks == "box" else "silhouette")


def _exact(engine: ImageEngine, asked: Sequence[Case], steps: int) -> tuple[list[Pixels], list[Pixels]]:
    """Exact edits, and those with another seed."""
    other_seed = run_edits(engine, asked[:SCALE_EDITS], steps, first_seed=OTHER_SEEDS)
    return pictures(run_edits(engine, asked, steps)), pictures(other_seed)


def _measure(
    engine: ImageEngine, asked: Sequence[Case], steps: int, setting: Setting, made: tuple[list[Pixels], list[Pixels]]
) -> Outcome:
    """made: by `_exact`."""
    (exact, other_seed), scaled = made, asked[:SCALE_EDITS]
    results, scheme = run_edits(engine, asked, steps, setting), engine.model.page_scheme
    if scheme is None:
        raise SystemExit("this model is served without mask-aware execution; there is nothing to compare")
    aware, reports = pictures(results), [result.reports[0] for result in results]
    return Outcome(
        likeness=Likeness.of(asked, exact, aware),
        other_seed=Likeness.of(scaled, exact[: len(scaled)], other_seed),
        accuracy=score(exact, asked),
        num_changed_outside=num_changed_outside(asked, aware),
        active=statistics.mean(report.mask_ratio for report in reports),
        page_bytes=scheme.template_bytes(reports[0].image_tokens, len(scheme.keyframes) or steps),
        exact=exact,
        aware=aware,
    )


def _ssim(figures: dict[str, float]) -> str:
    return f"{figures['mean']:.4f} / {figures['p10']:.4f}"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _write_worst(asked: Sequence[Case], outcome: Outcome, path: Path) -> None:
    """Input, mask, exact and mask-aware edit of the least alike, worst first."""
    rows = []
    for i in np.argsort(outcome.likeness.in_box)[:WORST]:
        images = asked[i].template, masked_view(asked[i]), outcome.exact[i], outcome.aware[i]
        ssim = f"SSIM in box {outcome.likeness.in_box[i]:.3f}"
        rows.append((images, f"“{asked[i].prompt}”   {ssim}   input, mask, exact, mask-aware"))
    write_sheet(path, rows)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--num-edits", type=int, default=200, help="edits")
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 28], help="denoising steps")
    parser.add_argument("--scenes", choices=("test", "tuning"), default="test", help="which held-out scenes")
    parser.add_argument("--masks", choices=MASKS, default=MASKS[0], help="a garment's outline, its box or part of that")
    parser.add_argument("--keyframes", default="auto", help="as the server's --cache-keyframes")
    parser.add_argument("--cache-dtype", choices=("auto", *get_args(PageDtype)), default="auto", help="of pages")
    parser.add_argument("--exact-dtype", choices=DTYPES, help="of exact edits; that of the others if not given")
    parser.add_argument("--margin", type=int, help="pixels around the mask")
    parser.add_argument("--full-steps", type=int, help="of every edit; by its mask ratio if not given")
    parser.add_argument(
        "--step-schedule", choices=get_args(StepScheduleName), default="full", help="of mask-aware edits"
    )
    parser.add_argument("--priming-prompt", default="", help="prompt that templates are primed with")
    parser.add_argument("--sheet", type=Path, help="picture of the ten edits least alike")
    return parser.parse_args(argv)

"""How close mask-aware edits come to exact ones as masks grow, and what full steps gain there.

Masks are silhouettes of garments, and boxes: of garments, of parts and middles of them, and anywhere. The embedded
model's `full_steps_from` was chosen on these scenes, which training and other benchmarks do not use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.quality.edits import Machine, Setting, options, pictures, run_edits
from benchmarks.quality.masks import box_anywhere, box_in_the_middle, part_of_box
from benchmarks.report import Row, print_report
from entrypoints import ImageEngine
from entrypoints.calibration.similarity import ssim_in_box
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases

SILHOUETTES, BOXES = seeds.TUNING + 2_000, seeds.TUNING + 52_000
EDGES = (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 1.0)


@dataclass(frozen=True)
class Judged:
    mask_ratio: float
    ssim: tuple[float, ...]  # in its mask's box, for each number of full steps


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--num-edits", type=int, default=96, help="of each kind of mask")
    parser.add_argument("--steps", type=int, nargs="+", default=[8], help="denoising steps")
    parser.add_argument("--full-steps", type=int, nargs="+", default=[0, 1, 2], help="columns of the table")
    args = parser.parse_args(argv)
    asked = edits(args.num_edits)
    with Machine(args.dtype, args.threads, model=args.model).engine(Setting()) as engine:
        for steps in args.steps:
            judged = {kind: _judge(engine, these, steps, args.full_steps) for kind, these in asked.items()}
            rows, result = _table(judged, args.full_steps)
            title = (
                f"{args.num_edits} edits of each kind of mask, {steps} steps: SSIM in the box, mean / p10 by full steps"
            )
            print_report(title, rows, {"benchmark": "quality_by_ratio", "steps": steps} | result, args.output)


def edits(number: int) -> dict[str, list[Case]]:
    """The cases by kind: silhouettes, or boxes of four sorts together."""
    silhouettes, boxes = cases(SILHOUETTES, number), cases(BOXES, number, "box")
    smaller = [make(case, seed) for make in (part_of_box, box_in_the_middle) for seed, case in enumerate(boxes)]
    anywhere = [box_anywhere(case, seed) for seed, case in enumerate(silhouettes)]
    return {"silhouettes": silhouettes, "boxes": [*boxes, *smaller, *anywhere]}


def _judge(engine: ImageEngine, asked: Sequence[Case], steps: int, full_steps: Sequence[int]) -> list[Judged]:
    exact = pictures(run_edits(engine, asked, steps))
    runs = [run_edits(engine, asked, steps, Setting(full_steps=full)) for full in full_steps]
    return [
        Judged(
            mask_ratio=results[0].reports[0].mask_ratio,
            ssim=tuple(ssim_in_box(picture, aware, case.mask) for aware in pictures(results)),
        )
        for case, picture, *results in zip(asked, exact, *runs, strict=True)
        if results[0].reports[0].exact_reason is None
    ]


def _table(judged: Mapping[str, list[Judged]], full_steps: Sequence[int]) -> tuple[list[Row], dict[str, float]]:
    rows, result = list[Row](), dict[str, float]()
    for kind, these in judged.items():
        for low, high in pairwise(EDGES):
            within = [edit for edit in these if low <= edit.mask_ratio < high]
            cells = {full: _mean_and_p10(edit.ssim[place] for edit in within) for place, full in enumerate(full_steps)}
            if within:
                shown = "   ".join(f"{full}: {mean:.4f} / {p10:.4f}" for full, (mean, p10) in cells.items())
                rows.append((f"{kind}, {low:.2f} - {high:.2f}, {len(within)} edits", shown))
                result |= {f"{kind}_{low:.2f}_full_{full}": mean for full, (mean, _) in cells.items()}
    return rows, result


def _mean_and_p10(values: Iterable[float]) -> tuple[float, float]:
    found = [*values] or [float("nan")]
    return float(np.mean(found)), float(np.percentile(found, 10))

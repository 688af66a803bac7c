"""How close mask-aware edits come to exact ones as masks grow, and what a full step gains and costs there.

Masks are silhouettes of garments, and boxes: of garments, of parts and middles of them, and anywhere. The scenes are
held out from training and other benchmarks: the embedded model's `full_steps_from` was chosen on them. Prints Markdown
(docs/quality.md holds a run).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.evidence.markdown import table_row
from benchmarks.quality.edits import Machine, Setting, add_options, lone_edit, pictures, run_edits
from benchmarks.quality.masks import box_anywhere, box_in_the_middle, part_of_box
from engine.similarity import ssim_in_box
from entrypoints import ImageEngine
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases

SILHOUETTES, BOXES = seeds.TUNING + 2_000, seeds.TUNING + 52_000
EDGES = (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 1.0)
TIMED_RATIO = 1 / 3


@dataclass(frozen=True)
class Judged:
    case: Case
    mask_ratio: float
    ssim: tuple[float, ...]  # in its mask's box, for each number of full steps


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    asked = edits(args.num_edits)
    with Machine(args.dtype, args.threads, model=args.model).engine(Setting()) as engine:
        for steps in args.steps:
            judged = {kind: _judge(engine, these, steps, args.full_steps) for kind, these in asked.items()}
            silhouettes, boxes = judged.pop("silhouettes"), [edit for these in judged.values() for edit in these]
            print(f"\n{args.num_edits} edits of each kind ({', '.join(asked)}), {steps} steps, {args.dtype}\n")
            print(_markdown({"silhouettes": silhouettes, "boxes": boxes}, args.full_steps), flush=True)
            print(_time(engine, judged["boxes"], steps, args.full_steps, args.rounds), flush=True)


def edits(number: int) -> dict[str, list[Case]]:
    """So many of each kind of mask."""
    silhouettes, boxes = cases(SILHOUETTES, number), cases(BOXES, number, "box")
    return {
        "silhouettes": silhouettes,
        "boxes": boxes,
        "parts of boxes": [part_of_box(case, seed) for seed, case in enumerate(boxes)],
        "boxes in the middle": [box_in_the_middle(case, seed) for seed, case in enumerate(boxes)],
        "boxes anywhere": [box_anywhere(case, seed) for seed, case in enumerate(silhouettes)],
    }


def _judge(engine: ImageEngine, asked: Sequence[Case], steps: int, full_steps: Sequence[int]) -> list[Judged]:
    exact = pictures(run_edits(engine, asked, steps))
    runs = [run_edits(engine, asked, steps, Setting(full_steps=full)) for full in full_steps]
    return [
        Judged(
            case=case,
            mask_ratio=results[0].reports[0].mask_ratio,
            ssim=tuple(ssim_in_box(picture, aware, case.mask) for aware in pictures(results)),
        )
        for case, picture, *results in zip(asked, exact, *runs, strict=True)
        if results[0].reports[0].exact_reason is None
    ]


def _markdown(judged: Mapping[str, list[Judged]], full_steps: Sequence[int]) -> str:
    heads = [f"{shape}, full_steps {full}" for shape in judged for full in full_steps]
    lines = [["mask ratio", "edits", *heads], ["---"] * (2 + len(heads))]
    for low, high in pairwise(EDGES):
        within = [[edit for edit in these if low <= edit.mask_ratio < high] for these in judged.values()]
        cells = [_cell(edit.ssim[place] for edit in these) for these in within for place in range(len(full_steps))]
        lines.append([f"{low:.2f} - {high:.2f}", " + ".join(str(len(these)) for these in within), *cells])
    return "\n".join(map(table_row, lines))


def _cell(values: Iterable[float]) -> str:
    found = list(values)
    return f"{np.mean(found):.4f} / {np.percentile(found, 10):.4f}" if found else ""


def _time(engine: ImageEngine, judged: Sequence[Judged], steps: int, full_steps: Sequence[int], rounds: int) -> str:
    """Lone warm edits in turn, exact and with each number of full steps, of the box whose mask ratio is nearest
    TIMED_RATIO."""
    box = min(judged, key=lambda edit: abs(edit.mask_ratio - TIMED_RATIO))
    kinds = [None, *(Setting(full_steps=full) for full in full_steps)]
    seconds = [[lone_edit(engine, box.case, steps, kind)[0] for kind in kinds] for _ in range(rounds + 1)][1:]
    # Each against the exact one of its own round: the machine may be busy.
    medians = [statistics.median(row[kind] / row[0] for row in seconds) for kind in range(1, len(kinds))]
    return (
        f"\nA lone warm edit under a box, mask ratio {box.mask_ratio:.2f}, {steps} steps, against an exact one"
        f" (medians of {rounds} in turn): "
        + ", ".join(f"{ratio:.2f} with full_steps {full}" for full, ratio in zip(full_steps, medians, strict=True))
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num-edits", type=int, default=96, help="of each kind of mask")
    parser.add_argument("--steps", type=int, nargs="+", default=[8], help="denoising steps")
    parser.add_argument("--full-steps", type=int, nargs="+", default=[0, 1, 2], help="columns of the table")
    parser.add_argument("--rounds", type=int, default=9, help="timed edits of each kind")
    add_options(parser)
    return parser.parse_args(argv)

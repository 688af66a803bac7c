"""How close mask-aware edits come to exact ones as masks grow, and what a full step buys and costs there.

Silhouettes of garments, and boxes: those of garments, parts and middles of them, and boxes anywhere in the picture. The
scenes are held out from training and not those of `benchmarks.quality`: the embedded model's `full_steps_from` was
chosen here. Prints Markdown (docs/quality.md holds a run).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.quality.edits import (
    Machine,
    Setting,
    aware_params,
    make_edit,
    pixels,
    run_aware,
    run_exact,
)
from benchmarks.quality.masks import box_anywhere, box_in_the_middle, part_of_box
from benchmarks.serving.pipeline_loop import DTYPES
from core.config import EMBEDDED_MODEL
from core.request import SamplingParams
from engine.similarity import ssim_in_box
from entrypoints import EditResult, ImageEngine
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases

SILHOUETTES, BOXES = seeds.TUNING + 2_000, seeds.TUNING + 52_000
EDGES = (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 1.0)
TIMED_RATIO = 1 / 3


@dataclass(frozen=True)
class Judged:
    """One edit: its mask ratio, and the SSIM in its mask's box for each number of full steps."""

    case: Case
    mask_ratio: float
    ssim: tuple[float, ...]


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    asked = edits(args.num_edits)
    with Machine(args.dtype, args.threads, model=args.model).engine(Setting()) as engine:
        for steps in args.steps:
            judged = {kind: _judge(engine, these, steps, args.full_steps) for kind, these in asked.items()}
            print(f"\n{args.num_edits} edits of each kind ({', '.join(asked)}), {steps} steps, {args.dtype}\n")
            print(_markdown(_by_shape(judged), args.full_steps), flush=True)
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
    exact = run_exact(engine, asked, steps)
    runs = [run_aware(engine, asked, steps, Setting(full_steps=full)) for full in full_steps]
    return [
        Judged(
            case=case,
            mask_ratio=results[0].reports[0].mask_ratio,
            ssim=tuple(ssim_in_box(picture, pixels(result), case.mask) for result in results),
        )
        for case, picture, *results in zip(asked, exact, *runs, strict=True)
        if results[0].reports[0].exact_reason is None
    ]


def _by_shape(judged: Mapping[str, list[Judged]]) -> dict[str, list[Judged]]:
    boxes = [edit for kind, these in judged.items() if kind != "silhouettes" for edit in these]
    return {"silhouettes": judged["silhouettes"], "boxes": boxes}


def _markdown(judged: Mapping[str, list[Judged]], full_steps: Sequence[int]) -> str:
    heads = " | ".join(f"{shape}, full_steps {full}" for shape in judged for full in full_steps)
    lines = [f"| mask ratio | edits | {heads} |", "| --- " * (2 + len(judged) * len(full_steps)) + "|"]
    for low, high in pairwise(EDGES):
        within = [[edit for edit in these if low <= edit.mask_ratio < high] for these in judged.values()]
        cells = [_cell(edit.ssim[place] for edit in these) for these in within for place in range(len(full_steps))]
        lines.append(f"| {low:.2f} - {high:.2f} | {' + '.join(str(len(these)) for these in within)} | ")
        lines[-1] += " | ".join(cells) + " |"
    return "\n".join(lines)


def _cell(values: Iterable[float]) -> str:
    found = list(values)
    return f"{np.mean(found):.4f} / {np.percentile(found, 10):.4f}" if found else ""


def _time(engine: ImageEngine, judged: Sequence[Judged], steps: int, full_steps: Sequence[int], rounds: int) -> str:
    """Lone warm edits of the box whose mask ratio is nearest TIMED_RATIO, exact and with each number of full steps, in
    turn.
    """
    box = min(judged, key=lambda edit: abs(edit.mask_ratio - TIMED_RATIO))
    exact = SamplingParams(seed=0, num_inference_steps=steps, mask_aware=False)
    kinds = [exact, *(aware_params(Setting(full_steps=full), 0, steps) for full in full_steps)]
    seconds = [[_edit_seconds(engine, box.case, params) for params in kinds] for _ in range(rounds + 1)][1:]
    medians = [
        statistics.median(row[kind] / row[0] for row in seconds)  # of its own round: the machine may be busy
        for kind in range(1, len(kinds))
    ]
    return (
        f"\nA lone warm edit under a box, mask ratio {box.mask_ratio:.2f}, {steps} steps, against an exact one"
        f" (medians of {rounds} in turn): "
        + ", ".join(f"{ratio:.2f} with full_steps {full}" for full, ratio in zip(full_steps, medians, strict=True))
    )


def _edit_seconds(engine: ImageEngine, case: Case, params: SamplingParams) -> float:
    start = time.perf_counter()
    _checked(engine.generate([make_edit(case)], params, use_tqdm=False))
    return time.perf_counter() - start


def _checked(results: Sequence[EditResult]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num-edits", type=int, default=96, help="of each kind of mask")
    parser.add_argument("--steps", type=int, nargs="+", default=[8], help="denoising steps")
    parser.add_argument("--full-steps", type=int, nargs="+", default=[0, 1, 2], help="columns of the table")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="a checkpoint of `tools.train_embedded`'s scenes")
    parser.add_argument("--rounds", type=int, default=9, help="timed edits of each kind")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type of both modes")
    parser.add_argument("--threads", type=int, default=0, help="torch threads of the worker; 0 = its own choice")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

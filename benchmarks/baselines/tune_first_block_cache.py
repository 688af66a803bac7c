"""Chooses the threshold of step skipping: the largest that keeps acceptable quality, on scenes set aside for tuning.

Acceptable is a mean SSIM of 0.95 and a P10 of 0.9 inside the mask's box, against the same pipeline without skipping.
FlashPS tunes TeaCache likewise: as fast as it gets with acceptable quality (section 6.1); its table 2 has 0.80 for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.baselines.fill_pipeline import FillPipeline
from benchmarks.quality.systems import fill_edit
from benchmarks.report import Value, print_report
from core.config import EMBEDDED_MODEL
from engine.similarity import ssim_in_box
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
MEAN_BAR, P10_BAR = 0.95, 0.9
FIRST_SCENE = seeds.TUNING + 60_000


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num-edits", type=int, default=24, help="half under silhouettes, half under boxes")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--thresholds", type=float, nargs="+", default=THRESHOLDS, help="tried, ascending")
    args = parser.parse_args(argv)
    asked = [*cases(FIRST_SCENE, args.num_edits // 2), *cases(FIRST_SCENE, args.num_edits // 2, "box")]
    exact, full_seconds = _run(None, asked, args)
    rows, best = [("no skipping", f"{full_seconds / len(asked):.3f} s per edit")], 0.0
    result: dict[str, Value] = {"benchmark": "tune_first_block_cache", "steps": args.steps, "num_edits": len(asked)}
    for threshold in args.thresholds:
        made, seconds = _run(threshold, asked, args)
        likeness = [ssim_in_box(a, b, case.mask) for a, b, case in zip(exact, made, asked, strict=True)]
        mean, p10 = float(np.mean(likeness)), float(np.percentile(likeness, 10))
        is_acceptable = mean >= MEAN_BAR and p10 >= P10_BAR
        best = threshold if is_acceptable else best
        speed = full_seconds / seconds
        rows.append((f"threshold {threshold:g}", f"{speed:.2f}x, SSIM in box {mean:.4f} / p10 {p10:.4f}"))
        result |= {f"speed_{threshold:g}": speed, f"ssim_{threshold:g}": mean, f"p10_{threshold:g}": p10}
    print_report(f"largest acceptable threshold: {best:g}", rows, result | {"threshold": best})


def _run(
    threshold: float | None, asked: Sequence[Case], args: argparse.Namespace
) -> tuple[list[npt.NDArray[np.uint8]], float]:
    """(pictures, seconds for all)."""
    pipeline = FillPipeline(EMBEDDED_MODEL, "float32", args.threads, threshold)
    fills = [fill_edit(case.prompt, case.template, case.mask, args.steps, i) for i, case in enumerate(asked)]
    pipeline(fills[:1])
    start = time.perf_counter()
    made = [np.asarray(pipeline([fill])[0]) for fill in fills]
    return made, time.perf_counter() - start


if __name__ == "__main__":
    main()

"""Which steps to leave out: step schedules against first-block caching, both by diffusers' FluxFillPipeline.

A schedule is decided before an edit and costs what its steps cost. First-block caching decides at each step, by how
much the first block's output has changed, and computes that block at every step. Both are compared with pictures of
all steps, without mask-aware execution.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.baselines.fill_pipeline import FillEdit, FillPipeline
from benchmarks.quality.edits import options
from benchmarks.quality.judge import edits_of
from benchmarks.report import Row, Value, print_report
from entrypoints.calibration.search import schedules
from entrypoints.calibration.similarity import ssim_in_box
from tools.train_embedded.cases import Case
from tools.train_embedded.scenes import Pixels

THRESHOLDS = (0.06, 0.08, 0.1, 0.14, 0.2)
"""Of first-block caching, from most to least careful."""


@dataclass(frozen=True)
class Run:
    """The edits of one setting."""

    pictures: list[Pixels]
    steps: float  # computed, mean
    seconds: float  # of an edit, median

    def row(self, name: str, whole: Run, asked: Sequence[Case]) -> tuple[Row, dict[str, Value]]:
        """Against the edits with all steps."""
        pairs = zip(whole.pictures, self.pictures, asked, strict=True)
        ssim: npt.NDArray[np.float64] = np.array([ssim_in_box(a, b, case.mask) for a, b, case in pairs])
        mean, p10, share = float(ssim.mean()), float(np.percentile(ssim, 10)), self.seconds / whole.seconds
        line = f"{self.steps:.1f} steps, SSIM {mean:.4f} / {p10:.4f}, {share:.2f} of the time of all steps"
        return (name, line), {f"{name}_ssim_mean": mean, f"{name}_ssim_p10": p10, f"{name}_time": share}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--num-edits", type=int, default=12)
    parser.add_argument("--steps", type=int, default=28, help="denoising steps")
    parser.add_argument("--masks", choices=("silhouette", "box", "part"), default="box")
    args = parser.parse_args(argv)
    asked = edits_of("test", args.masks, args.num_edits)
    plain = FillPipeline(args.model, args.dtype, args.threads)
    whole = _run(plain, asked, args.steps)
    found = {
        f"schedule of {len(computed)}": _run(plain, asked, args.steps, computed)
        for computed in schedules(args.steps)
        if args.steps // 4 <= len(computed) <= args.steps // 2
    }
    for threshold in THRESHOLDS:
        caching = FillPipeline(args.model, args.dtype, args.threads, threshold)
        found[f"first-block cache {threshold}"] = _run(caching, asked, args.steps)
    rows, result = list[Row](), dict[str, Value](benchmark="step_skipping", masks=args.masks, steps=args.steps)
    for name, run in found.items():
        row, figures = run.row(name, whole, asked)
        rows.append(row)
        result |= figures
    title = f"{args.num_edits} edits, masks: {args.masks}, {args.steps} steps; SSIM in the box, mean / p10"
    print_report(title, rows, result, args.output)


def _run(pipeline: FillPipeline, asked: Sequence[Case], steps: int, computed: Sequence[int] | None = None) -> Run:
    """computed: numbers of the steps that are computed; None: all, or as many as the pipeline's cache finds."""
    levels = np.linspace(1.0, 1.0 / steps, steps)
    sigmas = None if computed is None else levels[list(computed)].tolist()
    pictures, seconds = list[Pixels](), list[float]()
    with pipeline.counting_steps() as count:
        for seed, case in enumerate(asked):
            edit = FillEdit(
                case.prompt, Image.fromarray(case.template), Image.fromarray(case.mask), len(sigmas or levels), seed
            )
            began = time.perf_counter()
            pictures += [np.asarray(picture) for picture in pipeline([edit], sigmas)]
            seconds.append(time.perf_counter() - began)
    return Run(pictures, count() / len(asked), float(np.median(seconds)))


if __name__ == "__main__":
    main()

"""Time against likeness of edits that compute fewer steps: the ways of diffusers, and Stencil's step schedules.

A schedule is decided before an edit and costs what its steps cost; Stencil's go with mask-aware execution or without.
First-block caching decides at each step, by how much the first block's output has changed, and computes that block at
every step. Fewer steps are spaced evenly. All are compared with diffusers' pictures of all steps. Each edit is made in
all ways before the next one is, alone, its template's pages in the cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from benchmarks.baselines.fill_pipeline import FillEdit, FillPipeline
from benchmarks.command import command
from benchmarks.quality.edits import Machine, Setting
from benchmarks.quality.frontier_plot import Point, write_plot
from benchmarks.quality.judge import MASKS, edits_of
from benchmarks.report import Row, print_report
from core.config import EMBEDDED_MODEL
from core.sampling_params import SamplingParams
from core.step_schedule import StepSchedule, schedule_for
from entrypoints import Edit, ImageEngine
from entrypoints.calibration.search import schedules
from entrypoints.calibration.similarity import ssim_in_box
from tools.train_embedded.cases import Case
from tools.train_embedded.scenes import Pixels

THRESHOLDS = (0.08, 0.1, 0.14, 0.16, 0.2)
"""Of first-block caching, from most to least careful."""

Computed = tuple[int, ...]
"""Numbers of the steps that are computed."""


@dataclass(frozen=True)
class Made:
    """One edit. picture: the upload's pixels outside the mask. steps: computed."""

    picture: Pixels
    steps: int
    seconds: float


@dataclass(frozen=True)
class Way:
    """A way to make edits. family: of ways that differ in one number. computed: as asked for; None: all steps, or what
    the threshold of a first-block cache leaves of them. edit: from a case and its seed.
    """

    family: str
    edit: Callable[[Case, int], Made]
    computed: Computed | None = None
    first_block_cache: float | None = None
    num_inference_steps: int | None = None  # if other than asked for


@dataclass(frozen=True)
class Found:
    """The measured results of a way. steps: computed, mean. seconds: of an edit, median."""

    family: str
    computed: Computed | None
    first_block_cache: float | None
    num_inference_steps: int | None
    steps: float
    ssim_mean: float
    ssim_p10: float
    seconds: float

    @classmethod
    def of(cls, way: Way, made: Sequence[Made], whole: Sequence[Made], asked: Sequence[Case]) -> Found:
        """whole: the same edits with all steps, by diffusers."""
        pairs = zip(whole, made, asked, strict=True)
        ssim = [ssim_in_box(a.picture, b.picture, case.mask) for a, b, case in pairs]
        return cls(
            way.family,
            way.computed,
            way.first_block_cache,
            way.num_inference_steps,
            steps=float(np.mean([each.steps for each in made])),
            ssim_mean=float(np.mean(ssim)),
            ssim_p10=float(np.percentile(ssim, 10)),
            seconds=float(np.median([each.seconds for each in made])),
        )

    def row(self, whole_seconds: float) -> Row:
        name = self.family if self.first_block_cache is None else f"{self.family} {self.first_block_cache:g}"
        share = self.seconds / whole_seconds
        ssim = f"SSIM {self.ssim_mean:.4f} / {self.ssim_p10:.4f}"
        return name, f"{self.steps:4.1f} steps, {ssim}, {1e3 * self.seconds:5.0f} ms, {share:.2f} of diffusers' time"


class Diffusers:
    """Edits of diffusers' own pipeline."""

    def __init__(self, pipeline: FillPipeline, steps: int) -> None:
        self._pipeline = pipeline
        self._steps = steps

    def ways(self, computed: Sequence[Computed]) -> list[Way]:
        """All steps first. computed: the schedules to measure, most steps first."""
        return [
            Way("diffusers, schedule", self._edit),
            *(Way("diffusers, schedule", partial(self._edit, computed=each), each) for each in computed),
            *(
                Way("diffusers, first-block cache", partial(self._edit, threshold=each), first_block_cache=each)
                for each in THRESHOLDS
            ),
            *(
                Way("diffusers, fewer steps", partial(self._edit, steps=each), num_inference_steps=each)
                for each in (self._steps * share // 6 for share in (5, 4, 3))
            ),
        ]

    def _edit(
        self,
        case: Case,
        seed: int,
        computed: Computed | None = None,
        threshold: float | None = None,
        steps: int | None = None,
    ) -> Made:
        template, mask = Image.fromarray(case.template), Image.fromarray(case.mask)
        edit = FillEdit(case.prompt, template, mask, steps or self._steps, seed, computed, threshold)
        with self._pipeline.counting_steps() as count:
            began = time.perf_counter()
            (picture,) = self._pipeline([edit])
            seconds = time.perf_counter() - began
        return Made(np.where(case.mask[..., None], np.asarray(picture), case.template), count(), seconds)


class Stencil:
    """Edits of an ImageEngine, exact and mask-aware. schedule: of the checkpoint's calibration."""

    def __init__(self, engine: ImageEngine, schedule: StepSchedule, steps: int) -> None:
        self._engine = engine
        self._schedule = schedule
        self._steps = steps
        self._mask_ratios: dict[int, float] = {}  # seed of a case -> mask ratio; its template's pages are cached

    def ways(self, computed: Sequence[Computed]) -> list[Way]:
        every = [None, *computed]
        return [
            *(Way("Stencil, schedule", partial(self._aware, computed=each), each) for each in every),
            *(Way("Stencil exact, schedule", partial(self._edit, computed=each), each) for each in every),
        ]

    def _aware(self, case: Case, seed: int, computed: Computed | None) -> Made:
        """With full steps as the calibrated schedule has them."""
        if seed not in self._mask_ratios:
            self._mask_ratios[seed] = self._prime(case)
        if computed is None:
            return self._edit(case, seed, None, mask_aware=True)
        own_page_steps = self._schedule.full_steps_at(self._mask_ratios[seed], len(computed))
        return self._edit(case, seed, computed, mask_aware=True, own_page_steps=own_page_steps)

    def _prime(self, case: Case) -> float:
        """The mask ratio of a short edit, which leaves the template's pages in the cache."""
        params = SamplingParams(seed=0, num_inference_steps=self._steps, computed_steps=(0,), full_steps=0)
        (result,) = self._engine.generate([_edit_of(case)], [params], use_tqdm=False)
        return result.reports[0].mask_ratio

    def _edit(
        self,
        case: Case,
        seed: int,
        computed: Computed | None,
        mask_aware: bool = False,
        own_page_steps: tuple[int, ...] | None = None,
    ) -> Made:
        params = SamplingParams(
            seed=seed,
            num_inference_steps=self._steps,
            computed_steps=computed,
            mask_aware=mask_aware,
            own_page_steps=own_page_steps,
        )
        edit = _edit_of(case)
        began = time.perf_counter()
        (result,) = self._engine.generate([edit], [params], use_tqdm=False)
        seconds = time.perf_counter() - began
        if result.error is not None:
            raise result.error
        return Made(np.asarray(result.images[0]), result.reports[0].steps_computed, seconds)


def _edit_of(case: Case) -> Edit:
    return Edit(prompt=case.prompt, image=case.template, mask_image=case.mask.astype(np.uint8) * 255)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    asked = edits_of("test", args.masks, args.num_edits)
    pipeline = FillPipeline(args.model, args.dtype, args.threads)
    with Machine(args.dtype, args.threads, model=args.model).engine(Setting()) as engine:
        if not engine.model.step_schedules:
            raise SystemExit(f"{args.model} has no calibrated step schedule")
        schedule = schedule_for(engine.model.step_schedules, args.steps)
        computed = ladder(schedule.steps_of(args.steps), args.steps)
        stencil = Stencil(engine, schedule, args.steps)
        found = measure([*Diffusers(pipeline, args.steps).ways(computed), *stencil.ways(computed)], asked)
    title = f"{args.num_edits} edits, masks: {args.masks}, {args.steps} steps; SSIM in the box, mean / p10"
    result = {"benchmark": "step_skipping", "masks": args.masks, "steps": args.steps, "num_edits": args.num_edits}
    result |= {"calibrated": schedule.steps_of(args.steps), "ways": [asdict(each) for each in found]}
    print_report(title, [each.row(found[0].seconds) for each in found], result, args.output)
    if args.plot is not None:
        curves: dict[str, list[Point]] = {}
        for each in found:
            curves.setdefault(each.family, []).append(Point(each.seconds, each.ssim_mean))
        write_plot(args.plot, title, curves)


def ladder(calibrated: Computed, steps: int) -> list[Computed]:
    """The schedules to measure, most steps first: the calibrated one, and others between a quarter and a half of the
    steps.
    """
    by_length = {len(each): each for each in schedules(steps) if steps // 4 <= len(each) <= steps // 2}
    by_length[len(calibrated)] = calibrated
    return [by_length[length] for length in sorted(by_length, reverse=True)]


def measure(ways: Sequence[Way], asked: Sequence[Case]) -> list[Found]:
    """Compared with the first way."""
    made: list[list[Made]] = [[] for _ in ways]
    for seed, case in enumerate(tqdm(asked, unit="edit")):
        for way, edits in zip(ways, made, strict=True):
            edits.append(way.edit(case, seed))
    return [Found.of(way, edits, made[0], asked) for way, edits in zip(ways, made, strict=True)]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command(__doc__, model=EMBEDDED_MODEL, dtype="float32", threads=1, steps=28)
    parser.add_argument("--num-edits", type=int, default=12, help="edits, held out of training")
    parser.add_argument("--masks", choices=MASKS, default="box", help="a garment's outline, its box or part of that")
    parser.add_argument("--plot", type=Path, help="file of a plot of time against SSIM, .svg or .png")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

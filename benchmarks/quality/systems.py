"""Quality of every accelerated system against diffusers' own pictures (FlashPS, table 2), on held-out edits.

Checkpoint, seeds and steps are the same for all; docs/benchmarks.md explains the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.baselines.fill_pipeline import FillEdit, pipeline_process, run_edits
from benchmarks.baselines.systems import FIRST_BLOCK_CACHE
from benchmarks.command import command
from benchmarks.quality import edits
from benchmarks.quality.edits import OTHER_SEEDS, Machine, Setting
from benchmarks.quality.sheet import write_sheet
from benchmarks.report import print_report
from core.config import EMBEDDED_MODEL
from entrypoints import ImageEngine
from entrypoints.calibration.similarity import box_with_margin, ssim, ssim_in_box
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, MaskKind, cases
from tools.train_embedded.metrics import score
from tools.train_embedded.scenes import Pixels
from tools.train_embedded.sheet import masked_view

SCENES: dict[MaskKind, int] = {"silhouette": seeds.TEST, "box": seeds.TEST_BOXES}
REFERENCE = "diffusers"
OTHER_SEED = "diffusers, another seed"
SKIPPING = "diffusers, first-block cache"
SHEET_ROWS = 10
SCALE_SHARE = 8
"""Another seed and the exact mode only give the scale: they make one edit in this many."""


@dataclass(frozen=True)
class Made:
    """The pictures of one system as it returns them, and seconds of all."""

    pictures: list[Pixels]
    seconds: float


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    for masks in args.masks:
        _compare(args, masks)


def _compare(args: argparse.Namespace, masks: MaskKind) -> None:
    asked = cases(SCENES[masks], args.num_edits, masks)
    made = _make_all(args, asked)
    result: dict[str, Any] = {"benchmark": "quality_systems", "steps": args.steps, "masks": masks}
    result |= {"num_edits": len(asked), "dtype": args.dtype, "threads": args.threads}
    result |= {"first_block_cache": args.first_block_cache}
    systems = {name: judge(asked, made[REFERENCE], one) for name, one in made.items()}
    args.sheets.mkdir(parents=True, exist_ok=True)
    _write_sheet(asked, made, args.sheets / f"benchmarks_sheet_{masks}.png")
    rows = [(name, _line(figures)) for name, figures in systems.items()]
    print_report(
        f"{len(asked)} edits, {masks} masks, {args.steps} steps", rows, result | {"systems": systems}, args.output
    )


def judge(asked: Sequence[Case], reference: Made, made: Made) -> dict[str, float]:
    """Figures of one system, on as many of the edits as it made."""
    number = len(made.pictures)
    asked, reference = asked[:number], Made(reference.pictures[:number], reference.seconds)
    pasted = [_pasted(case, picture) for case, picture in zip(asked, made.pictures, strict=True)]
    wanted = [_pasted(case, picture) for case, picture in zip(asked, reference.pictures, strict=True)]
    triples = list(zip(asked, wanted, pasted, strict=True))
    in_box = [ssim_in_box(a, b, case.mask) for case, a, b in triples]
    outside = [_outside_error(case, picture) for case, picture in zip(asked, made.pictures, strict=True)]
    accuracy = score(pasted, asked)
    return {
        "ssim_box_mean": float(np.mean(in_box)),
        "ssim_box_p10": float(np.percentile(in_box, 10)),
        "psnr_box_mean_db": float(np.mean([_psnr_in_box(*triple) for triple in triples])),
        "ssim_whole_mean": float(np.mean([ssim(a, b) for _, a, b in triples])),
        "colour": accuracy.colour,
        "pattern": accuracy.pattern,
        "outside_error_mean": float(np.mean(outside)),
        "outside_changed": float(np.mean(np.array(outside) > 0)),
        "seconds_per_edit": made.seconds / number,
        "num_edits": number,
    }


def _pasted(case: Case, picture: Pixels) -> Pixels:
    """With the upload's own pixels outside the mask."""
    return np.where(case.mask[..., None], picture, case.template)


def _psnr_in_box(case: Case, a: Pixels, b: Pixels) -> float:
    """Decibels; equal pictures count as 60."""
    box = box_with_margin(case.mask)
    a, b = a[box], b[box]
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return min(60.0, 10 * np.log10(255**2 / error)) if error else 60.0


def _outside_error(case: Case, picture: Pixels) -> float:
    """Mean absolute difference to the upload outside the mask, of 255."""
    return float(np.abs(picture[~case.mask].astype(np.int16) - case.template[~case.mask]).mean())


def _make_all(args: argparse.Namespace, asked: Sequence[Case]) -> dict[str, Made]:
    few = asked[: max(2, len(asked) // SCALE_SHARE)]
    made = {
        REFERENCE: _from_pipeline(args, asked),
        OTHER_SEED: _from_pipeline(args, few, first_seed=OTHER_SEEDS),
        SKIPPING: _from_pipeline(args, asked, first_block_cache=args.first_block_cache),
    }
    with Machine(args.dtype, args.threads).engine(Setting()) as engine:
        made["Stencil, mask-aware off"] = _from_engine(engine, few, args.steps, None)
        made["Stencil"] = _from_engine(engine, asked, args.steps, Setting())
    return made


def _from_engine(engine: ImageEngine, asked: Sequence[Case], steps: int, setting: Setting | None) -> Made:
    start = time.perf_counter()
    pictures = edits.pictures(edits.run_edits(engine, asked, steps, setting))
    return Made(pictures, time.perf_counter() - start)


def _from_pipeline(
    args: argparse.Namespace, asked: Sequence[Case], first_seed: int = 0, first_block_cache: float | None = None
) -> Made:
    """By diffusers, in a process of its own. Case i has seed first_seed + i."""
    fills = [_fill_edit(case, args.steps, first_seed + number, first_block_cache) for number, case in enumerate(asked)]
    with pipeline_process(EMBEDDED_MODEL, args.dtype, args.threads) as pipeline:
        pictures, seconds = pipeline.submit(run_edits, fills).result()
    return Made([np.asarray(picture) for picture in pictures], seconds)


def _fill_edit(case: Case, steps: int, seed: int, first_block_cache: float | None) -> FillEdit:
    white = Image.fromarray(case.mask.astype(np.uint8) * 255)
    picture = Image.fromarray(case.template)
    return FillEdit(case.prompt, picture, white, steps, seed, first_block_cache=first_block_cache)


def _write_sheet(asked: Sequence[Case], made: Mapping[str, Made], path: Path) -> None:
    """The first edits: template, mask, diffusers, step skipping, Stencil."""
    names = [REFERENCE, SKIPPING, "Stencil"]
    rows = [
        ([case.template, masked_view(case), *(made[name].pictures[row] for name in names)], f"“{case.prompt}”")
        for row, case in enumerate(asked[:SHEET_ROWS])
    ]
    write_sheet(path, rows, ["template", "mask", *names])


def _line(figures: Mapping[str, float]) -> str:
    return (
        f"SSIM in box {figures['ssim_box_mean']:.4f} / p10 {figures['ssim_box_p10']:.4f}, "
        f"PSNR {figures['psnr_box_mean_db']:.1f} dB, whole {figures['ssim_whole_mean']:.4f}, "
        f"colour {figures['colour']:.1%}, pattern {figures['pattern']:.1%}, "
        f"outside {figures['outside_error_mean']:.2f}, "
        f"{figures['seconds_per_edit']:.2f} s"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command(__doc__, steps=8, dtype="float32", threads=1)
    parser.add_argument("--num-edits", type=int, default=100, help="held-out edits of each kind of mask")
    parser.add_argument("--masks", nargs="+", choices=SCENES, default=list(SCENES), help="garments' outlines or boxes")
    parser.add_argument("--first-block-cache", type=float, default=FIRST_BLOCK_CACHE, help="threshold of step skipping")
    parser.add_argument("--sheets", type=Path, default=Path(), help="folder for the contact sheets")
    return parser.parse_args(argv)

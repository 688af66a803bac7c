"""Quality beside speed (FlashPS, table 2): held-out edits by every accelerated system against diffusers' own pictures.

The same checkpoint, seeds and steps for all. SSIM and PSNR inside the mask's box and SSIM of the whole picture compare
with what diffusers makes, its pixels outside the mask replaced by the upload's for those that concern the edit. "Whole"
compares pictures as each system returns them, as the paper does: diffusers sends all of a picture through its
autoencoder, Stencil leaves what lies outside the mask as it came. Colour and pattern are read from the garment. The
feature distance is a Frechet distance as FID's, but on features of the network of `benchmarks.feature_net`, which knows
this project's drawn scenes alone: its figures compare systems here and nothing else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.baselines.systems import FIRST_BLOCK_CACHE
from benchmarks.pipeline_loop import DTYPES
from benchmarks.quality_edits import Machine, Setting, pixels, run_aware, run_exact
from benchmarks.report import print_report
from benchmarks.server import ROOT
from core.config import EMBEDDED_MODEL
from engine.similarity import mask_box, ssim, ssim_in_box
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases
from tools.train_embedded.metrics import score
from tools.train_embedded.scenes import SIZE, Pixels
from tools.train_embedded.sheet import masked_view

SCENES = {"silhouette": seeds.TEST, "box": seeds.TEST_BOXES}
REFERENCE = "diffusers"
OTHER_SEED = "diffusers, another seed"
SKIPPING = "diffusers, first-block cache"
SHEET_ROWS = 10
SCALE_SHARE = 4
"""One of so many edits, from the first on, is enough for what is beside the point: another seed, and the exact mode."""


@dataclass(frozen=True)
class Made:
    """The pictures of one system, as it returns them, and the seconds it took for all."""

    pictures: list[Pixels]
    seconds: float


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    if args.child:
        return _make_with_pipeline(args)
    asked = _cases(args)
    made = _make_all(args, asked)
    result = {"benchmark": "quality_systems", "steps": args.steps, "masks": args.masks, "num_edits": len(asked)}
    result |= {"dtype": args.dtype, "threads": args.threads, "first_block_cache": args.first_block_cache}
    systems = {name: judge(asked, made[REFERENCE], one) for name, one in made.items()}
    _write_sheet(asked, made, args.sheet)
    rows = [(name, _line(figures)) for name, figures in systems.items()]
    print_report(f"{len(asked)} edits, {args.masks} masks, {args.steps} steps", rows, result | {"systems": systems})
    return None


def judge(asked: Sequence[Case], reference: Made, made: Made) -> dict[str, float]:
    """Figures of one system, on as many of the edits as it made."""
    from benchmarks.feature_net import distance

    number = len(made.pictures)
    asked, reference = asked[:number], Made(reference.pictures[:number], reference.seconds)
    pasted = [_pasted(case, picture) for case, picture in zip(asked, made.pictures, strict=True)]
    wanted = [_pasted(case, picture) for case, picture in zip(asked, reference.pictures, strict=True)]
    triples = list(zip(asked, wanted, pasted, strict=True))
    in_box = [ssim_in_box(a, b, case.mask) for case, a, b in triples]
    raw = list(zip(reference.pictures, made.pictures, strict=True))
    outside = [_outside_error(case, picture) for case, picture in zip(asked, made.pictures, strict=True)]
    accuracy = score(pasted, asked)
    return {
        "ssim_box_mean": float(np.mean(in_box)),
        "ssim_box_p10": float(np.percentile(in_box, 10)),
        "psnr_box_mean_db": float(np.mean([_psnr(a[mask_box(c.mask)], b[mask_box(c.mask)]) for c, a, b in triples])),
        "ssim_whole_mean": float(np.mean([ssim(a, b) for a, b in raw])),
        "ssim_whole_pasted_mean": float(np.mean([ssim(a, b) for _, a, b in triples])),
        "colour": accuracy.colour,
        "pattern": accuracy.pattern,
        "feature_distance": distance(wanted, pasted),
        "outside_error_mean": float(np.mean(outside)),
        "outside_changed": float(np.mean(np.array(outside) > 0)),
        "seconds_per_edit": made.seconds / number,
        "num_edits": number,
    }


def _pasted(case: Case, picture: Pixels) -> Pixels:
    """With the upload's own pixels outside the mask."""
    return np.where(case.mask[..., None], picture, case.template)


def _psnr(a: Pixels, b: Pixels) -> float:
    """Decibels; equal pictures count as 60."""
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return min(60.0, 10 * np.log10(255**2 / error)) if error else 60.0


def _outside_error(case: Case, picture: Pixels) -> float:
    """Mean absolute difference to the upload outside the mask, of 255."""
    return float(np.abs(picture[~case.mask].astype(np.int16) - case.template[~case.mask]).mean())


# ------------------------------------------------------------------------------------------------------------ pictures


def _make_all(args: argparse.Namespace, asked: Sequence[Case]) -> dict[str, Made]:
    machine, few = Machine(args.dtype, args.threads, ""), max(2, len(asked) // SCALE_SHARE)
    made = {
        REFERENCE: _ask_pipeline(args, 0, None),
        OTHER_SEED: _ask_pipeline(args, 1_000_000, None, few),
        SKIPPING: _ask_pipeline(args, 0, args.first_block_cache),
    }
    with machine.engine(Setting()) as engine:
        made["Stencil, mask-aware off"] = _timed(lambda: run_exact(engine, asked[:few], args.steps))
        made["Stencil"] = _timed(lambda: [pixels(result) for result in run_aware(engine, asked, args.steps, Setting())])
    return made


def _timed(make: Callable[[], list[Pixels]]) -> Made:
    start = time.perf_counter()
    return Made(make(), time.perf_counter() - start)


def _ask_pipeline(
    args: argparse.Namespace, first_seed: int, threshold: float | None, number: int | None = None
) -> Made:
    """From a process of its own: threads and memory are the pipeline's alone. number: of edits, all by default."""
    flags = ["--steps", str(args.steps), "--masks", args.masks, "--num-edits", str(number or args.num_edits)]
    flags += ["--scenes", args.scenes, "--dtype", args.dtype, "--threads", str(args.threads)]
    flags += ["--first-seed", str(first_seed)]
    flags += [] if threshold is None else ["--first-block-cache", str(threshold)]
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "pictures.npz")
        command = [sys.executable, "-m", "benchmarks.quality_systems", "--child", file, *flags]
        if threshold is None:
            command.append("--no-first-block-cache")
        subprocess.run(command, cwd=ROOT, check=True)
        with np.load(file) as made:
            return Made(list(made["pictures"]), float(made["seconds"]))


def _make_with_pipeline(args: argparse.Namespace) -> None:
    from benchmarks.baselines.fill_pipeline import FillPipeline

    asked = _cases(args)
    threshold = None if args.no_first_block_cache else args.first_block_cache
    pipeline = FillPipeline(EMBEDDED_MODEL, args.dtype, args.threads, threshold)
    made = _timed(lambda: pipeline_pictures(pipeline, asked, args.steps, args.first_seed))
    np.savez(args.child, pictures=np.array(made.pictures), seconds=made.seconds)


def pipeline_pictures(
    pipeline: Callable[..., Sequence[Image.Image]], asked: Sequence[Case], steps: int, first_seed: int = 0
) -> list[Pixels]:
    """What the pipeline makes of each case, one at a time; case i has seed first_seed + i."""
    from benchmarks.baselines.fill_pipeline import FillEdit

    made = []
    for i, case in enumerate(asked):
        mask = Image.fromarray(case.mask.astype(np.uint8) * 255)
        (picture,) = pipeline([FillEdit(case.prompt, Image.fromarray(case.template), mask, steps, first_seed + i)])
        made.append(np.asarray(picture))
    return made


def _cases(args: argparse.Namespace) -> list[Case]:
    first = SCENES[args.masks] if args.scenes == "test" else seeds.TUNING + 60_000
    return cases(first, args.num_edits, args.masks)


# --------------------------------------------------------------------------------------------------------- the report


def _write_sheet(asked: Sequence[Case], made: Mapping[str, Made], path: Path) -> None:
    """A row an edit: template, mask, diffusers, step skipping, Stencil."""
    names = [REFERENCE, SKIPPING, "Stencil"]
    caption, gap = 20, 6
    columns, number = 2 + len(names), min(SHEET_ROWS, len(asked))
    sheet = Image.new("RGB", (columns * (SIZE + gap) + gap, caption + number * (SIZE + caption + gap) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for column, name in enumerate(["template", "mask", *names]):
        draw.text((gap + column * (SIZE + gap) + 2, 3), name, fill="black", font_size=14)
    for row in range(number):
        case, top = asked[row], caption + gap + row * (SIZE + caption + gap)
        shown = [case.template, masked_view(case), *(made[name].pictures[row] for name in names)]
        for column, picture in enumerate(shown):
            sheet.paste(Image.fromarray(picture), (gap + column * (SIZE + gap), top))
        draw.text((gap + 2, top + SIZE + 3), f"“{case.prompt}”", fill="black", font_size=14)
    sheet.save(path, optimize=True)


def _line(figures: Mapping[str, float]) -> str:
    return (
        f"SSIM in box {figures['ssim_box_mean']:.4f} / p10 {figures['ssim_box_p10']:.4f}, "
        f"PSNR {figures['psnr_box_mean_db']:.1f} dB, whole {figures['ssim_whole_mean']:.4f}, "
        f"colour {figures['colour']:.1%}, pattern {figures['pattern']:.1%}, "
        f"feature distance {figures['feature_distance']:.3f}, outside {figures['outside_error_mean']:.2f}, "
        f"{figures['seconds_per_edit']:.2f} s"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num-edits", type=int, default=200, help="held-out edits")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    parser.add_argument("--masks", choices=SCENES, default="silhouette", help="a garment's outline or box")
    parser.add_argument("--scenes", choices=("test", "tuning"), default="test", help="which held-out scenes")
    parser.add_argument("--first-block-cache", type=float, default=FIRST_BLOCK_CACHE, help="threshold of step skipping")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="compute type of all")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of all")
    parser.add_argument("--sheet", type=Path, default=Path("quality_systems.png"), help="where the contact sheet goes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--first-seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--no-first-block-cache", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

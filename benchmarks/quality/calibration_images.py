"""Writes the edits that the embedded model is calibrated on: `python -m benchmarks.quality images DIR`.

Equal shares of silhouettes, boxes and parts of boxes, of scenes that neither training nor other benchmarks use. Images
and masks go to DIR/images and prompts to DIR/prompts.txt, the input of `python -m entrypoints.calibrate`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.quality.masks import part_of_box
from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases

SILHOUETTES, BOXES, PARTS = seeds.TUNING + 1_000, seeds.TUNING + 51_000, seeds.TUNING + 53_000


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--num-edits", type=int, default=48, help="a multiple of three (default: 48)")
    args = parser.parse_args(argv)
    third = args.num_edits // 3
    parts = [part_of_box(case, seed) for seed, case in enumerate(cases(PARTS, third, "box"))]
    triples = zip(cases(SILHOUETTES, third), cases(BOXES, third, "box"), parts, strict=True)
    write([case for triple in triples for case in triple], args.folder)


def write(asked: Sequence[Case], folder: Path) -> None:
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    for i, case in enumerate(asked):
        Image.fromarray(case.template).save(images / f"{i:03}.png")
        Image.fromarray(case.mask.astype(np.uint8) * 255).save(images / f"{i:03}_mask.png")
    (folder / "prompts.txt").write_text("".join(f"{case.prompt}\n" for case in asked))

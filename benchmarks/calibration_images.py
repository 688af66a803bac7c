"""The edits that the embedded model's own calibration was made on: `python -m benchmarks.calibration_images DIR`

Half silhouettes, half boxes, of scenes that neither training nor the quality benchmark sees. Writes images and masks to
DIR/images and their prompts, in the same order, to DIR/prompts.txt, as `python -m entrypoints.calibrate` takes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tools.train_embedded import seeds
from tools.train_embedded.cases import Case, cases

SILHOUETTES, BOXES = seeds.TUNING + 1_000, seeds.TUNING + 51_000


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--num-edits", type=int, default=16, help="an even number (default: 16)")
    args = parser.parse_args(argv)
    half = args.num_edits // 2
    pairs = zip(cases(SILHOUETTES, half), cases(BOXES, half, "box"), strict=True)
    write([case for pair in pairs for case in pair], args.folder)


def write(asked: Sequence[Case], folder: Path) -> None:
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    for i, case in enumerate(asked):
        Image.fromarray(case.template).save(images / f"{i:03}.png")
        Image.fromarray(case.mask.astype(np.uint8) * 255).save(images / f"{i:03}_mask.png")
    (folder / "prompts.txt").write_text("".join(f"{case.prompt}\n" for case in asked))


if __name__ == "__main__":
    main()

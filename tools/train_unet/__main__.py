"""Train a small Stable Diffusion inpainting checkpoint on drawn scenes, for measurements of mask-aware UNets."""

import argparse
from pathlib import Path

import torch

from tools.train_unet.export import export
from tools.train_unet.trainer import Recipe, Trainer

STAGES = ("train", "export")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_unet", description=__doc__)
    parser.add_argument("stage", nargs="?", choices=STAGES, help="default: both in order")
    parser.add_argument("--work", type=Path, default=Path(".train_unet"), help="training state and examples")
    parser.add_argument("--out", type=Path, default=Path(".train_unet/checkpoint"), help="the exported checkpoint")
    parser.add_argument("--minutes", type=float, default=62.0, help="training time, earlier runs included")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.stage != "export":
        Trainer(Recipe(), options.work, options.minutes * 60).train()
    if options.stage != "train":
        export(options.work, options.out)


if __name__ == "__main__":
    main()

"""Writes a checkpoint whose tokens dominate: FLUX-shaped blocks of random weights for 512 x 512 px.

The autoencoder, text encoders and tokenizers are the embedded model's. Its pictures mean nothing; the time they take
does: at 1024 image tokens of width 512, overheads that matter beside the embedded model hardly do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIDE = 512


def write_checkpoint(path: Path, side: int = SIDE, shape: Mapping[str, Any] | None = None) -> None:
    """A FluxFillPipeline in the diffusers layout, for pictures of `side` px. shape: arguments of its transformer; by
    default hidden size 512, 4 + 8 blocks."""
    import torch
    from diffusers import FluxFillPipeline, FluxTransformer2DModel

    from benchmarks.micro.denoiser_step import FLUX_SHAPE
    from core.config import EMBEDDED_MODEL

    pipeline = FluxFillPipeline.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    own = pipeline.transformer.config
    names = ("patch_size", "in_channels", "out_channels", "joint_attention_dim", "pooled_projection_dim")
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(**FLUX_SHAPE | dict(shape or {}) | {name: own[name] for name in names})
    pipeline.register_modules(transformer=transformer)
    pipeline.vae.register_to_config(sample_size=side)
    pipeline.save_pretrained(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="folder to write")
    write_checkpoint(parser.parse_args(argv).path)


if __name__ == "__main__":
    main()

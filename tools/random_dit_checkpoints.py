"""Writes random checkpoints of class-conditional DiTs in the diffusers layout, for tests and benchmarks.

python -m tools.random_dit_checkpoints checkpoints/dit-s-2    # of the size of DiT-S/2
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

from tools.random_checkpoints import autoencoder, save

TINY: dict[str, Any] = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32, "sample_size": 8}
"""Sizes of a transformer for tests."""

DIT_S_2: dict[str, Any] = {"num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64, "sample_size": 32}
"""Sizes of DiT-S/2 for 256x256 pixels (Peebles and Xie, Scalable Diffusion Models with Transformers, table 1)."""

CLASSES = 1000
"""ImageNet's, for which DiTPipeline is made."""

DIT_SCHEDULER = {"clip_sample": False}
"""Configuration of DDIMScheduler in DiT's checkpoints; that of their noise is diffusers' default."""

NAMES = {0: "tench, Tinca tinca", 1: "goldfish", 207: "golden retriever", 999: "toilet tissue, toilet paper"}
"""As `id2label` of model_index.json."""


def make_dit(
    path: Path,
    sizes: Mapping[str, Any] = TINY,
    *,
    seed: int = 0,
    has_names: bool = True,
    scheduler: dict[str, Any] | None = None,
    scheduler_class: Any = DDIMScheduler,
    generation_config: dict[str, Any] | None = None,
    **transformer: Any,
) -> Path:
    """Write a DiTPipeline with random weights to `path`, and return `path`. Its autoencoder is small. sizes,
    transformer: of the transformer's configuration. scheduler: its configuration, by default DIT_SCHEDULER."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        denoiser = dit_transformer(**{**sizes, **transformer})
        pipeline = DiTPipeline(
            transformer=denoiser,
            vae=autoencoder(8 * denoiser.config.sample_size, latent_channels=4, scaling_factor=0.18215),
            scheduler=scheduler_class(**(DIT_SCHEDULER if scheduler is None else scheduler)),
        )
    if has_names:
        pipeline.register_to_config(id2label={str(label): names for label, names in NAMES.items()})
    return save(pipeline, path, generation_config)


def dit_transformer(**options: Any) -> DiTTransformer2DModel:
    """options: of its configuration, besides the channels."""
    channels = {"in_channels": 4, "out_channels": 8}
    return DiTTransformer2DModel(**{**channels, "num_embeds_ada_norm": CLASSES, **options})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder to write")
    make_dit(parser.parse_args(argv).path, DIT_S_2)


if __name__ == "__main__":
    main()

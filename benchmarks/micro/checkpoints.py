"""Writes checkpoints of random weights for 512 x 512 px; their pictures mean nothing, the time they take does.

large: FLUX-shaped blocks, whose tokens dominate: at 1024 image tokens of width 512, overheads that matter beside the
embedded model hardly do. Autoencoder, text encoders and tokenizers are the embedded model's.
sdxl: SDXL's UNet with the transformers' depth cut, text encoders of its width and two layers, half its VAE's width.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core.config import EMBEDDED_MODEL

LARGE_SIDE = SDXL_SIDE = 512
DEPTH = 2
"""Most blocks of a transformer of `sdxl`."""
TEXT_WIDTHS = (768, 1280)
VAE_CHANNELS = (64, 128, 256, 256)


def write_large(path: Path) -> None:
    """A FluxFillPipeline in the diffusers layout."""
    import torch
    from diffusers import FluxFillPipeline, FluxTransformer2DModel

    from benchmarks.micro.denoiser_step import FLUX_SHAPE

    pipeline = FluxFillPipeline.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    own = pipeline.transformer.config
    names = ("patch_size", "in_channels", "out_channels", "joint_attention_dim", "pooled_projection_dim")
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(**FLUX_SHAPE | {name: own[name] for name in names})
    pipeline.register_modules(transformer=transformer)
    pipeline.vae.register_to_config(sample_size=LARGE_SIDE)
    pipeline.save_pretrained(path)


def write_sdxl(path: Path) -> None:
    """A StableDiffusionXLPipeline in the diffusers layout, bfloat16."""
    import torch
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    from benchmarks.micro.unet_step import CONFIGS, LAYERS, TEXT_TOKENS, with_depth

    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(EMBEDDED_MODEL, subfolder="tokenizer", model_max_length=TEXT_TOKENS)
    config = with_depth(LAYERS | CONFIGS["sdxl"], DEPTH)
    pipeline = StableDiffusionXLPipeline(
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=VAE_CHANNELS,
            layers_per_block=2,
            latent_channels=4,
            sample_size=SDXL_SIDE,
            scaling_factor=0.13025,
        ),
        text_encoder=CLIPTextModel(_text_config(tokenizer, TEXT_WIDTHS[0])),
        text_encoder_2=CLIPTextModelWithProjection(_text_config(tokenizer, TEXT_WIDTHS[1])),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=UNet2DConditionModel(**config | {"sample_size": SDXL_SIDE // 8}),
        scheduler=EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        add_watermarker=False,
    )
    pipeline.to(torch.bfloat16).save_pretrained(path)


def _text_config(tokenizer: Any, width: int) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )


CHECKPOINTS: dict[str, Callable[[Path], None]] = {"large": write_large, "sdxl": write_sdxl}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CHECKPOINTS, help="which one")
    parser.add_argument("path", type=Path, help="folder to write")
    args = parser.parse_args(argv)
    CHECKPOINTS[args.name](args.path)


if __name__ == "__main__":
    main()

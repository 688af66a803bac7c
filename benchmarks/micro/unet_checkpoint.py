"""Writes a checkpoint shaped like SDXL's, of random weights: its UNet, the transformers' depth cut, for 512 x 512 px.

Text encoders are as wide as SDXL's and of two layers, the VAE is half as
wide as its own. Its pictures mean nothing; the time they take does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.micro.unet_step import CONFIGS, LAYERS, TEXT_TOKENS
from core.config import EMBEDDED_MODEL

SIDE = 512
TEXT_WIDTHS = (768, 1280)
VAE_CHANNELS = (64, 128, 256, 256)


def write_checkpoint(path: Path, depth: int) -> None:
    """A StableDiffusionXLPipeline in the diffusers layout, bfloat16. depth: most blocks of a transformer."""
    import torch
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(EMBEDDED_MODEL, subfolder="tokenizer", model_max_length=TEXT_TOKENS)
    config = LAYERS | CONFIGS["sdxl"]
    depths = tuple(min(blocks, depth) for blocks in config["transformer_layers_per_block"])
    pipeline = StableDiffusionXLPipeline(
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=VAE_CHANNELS,
            layers_per_block=2,
            latent_channels=4,
            sample_size=SIDE,
            scaling_factor=0.13025,
        ),
        text_encoder=CLIPTextModel(_text_config(tokenizer, TEXT_WIDTHS[0])),
        text_encoder_2=CLIPTextModelWithProjection(_text_config(tokenizer, TEXT_WIDTHS[1])),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=UNet2DConditionModel(
            **config | {"transformer_layers_per_block": depths, "sample_size": SIDE // 8},
        ),
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
        max_position_embeddings=TEXT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="folder to write")
    parser.add_argument("--depth", type=int, default=2, help="most blocks of a transformer")
    args = parser.parse_args(argv)
    write_checkpoint(args.path, args.depth)


if __name__ == "__main__":
    main()

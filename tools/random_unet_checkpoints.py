"""Writes small random checkpoints of Stable Diffusion 1, 2 and XL in the diffusers layout, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModelWithProjection

from tools.random_checkpoints import autoencoder, clip_encoder, clip_tokenizer, save

NOISE_SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
"""Scheduler configuration that all Stable Diffusion checkpoints share."""


def make_sd(
    path: Path,
    *,
    seed: int = 0,
    in_channels: int = 4,
    clip_tokens: int = 12,
    scheduler: dict[str, Any] | None = None,
    scheduler_class: Any = DDIMScheduler,
    generation_config: dict[str, Any] | None = None,
    native_size: int = 128,
    **unet: Any,
) -> Path:
    """Write a StableDiffusionPipeline with random weights to `path`, and return `path`. in_channels: 4, or 9 for an
    inpainting checkpoint. scheduler: its configuration besides the noise schedule. unet: the UNet's, besides sizes.
    """
    width = 24
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer(clip_tokens)
        pipeline = StableDiffusionPipeline(
            scheduler=_noise_scheduler(scheduler_class, scheduler),
            vae=_sd_vae(native_size),
            text_encoder=clip_encoder(tokenizer, clip_tokens, width),
            tokenizer=tokenizer,
            unet=sd_unet(in_channels, width, sample_size=native_size // 8, **unet),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    return save(pipeline, path, generation_config)


def make_sdxl(
    path: Path,
    *,
    seed: int = 0,
    in_channels: int = 4,
    clip_tokens: int = 12,
    scheduler: dict[str, Any] | None = None,
    scheduler_class: Any = DDIMScheduler,
    generation_config: dict[str, Any] | None = None,
    native_size: int = 128,
    zero_prompt: bool = True,
) -> Path:
    """As `make_sd`, but a StableDiffusionXLPipeline. zero_prompt: whether a missing negative prompt becomes zeros."""
    width = 24
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer(clip_tokens)
        pipeline = StableDiffusionXLPipeline(
            scheduler=_noise_scheduler(scheduler_class, scheduler),
            vae=_sd_vae(native_size),
            text_encoder=clip_encoder(tokenizer, clip_tokens, width),
            tokenizer=tokenizer,
            text_encoder_2=clip_encoder(tokenizer, clip_tokens, width, CLIPTextModelWithProjection),
            tokenizer_2=tokenizer,
            unet=sdxl_unet(in_channels, width, sample_size=native_size // 8),
            force_zeros_for_empty_prompt=zero_prompt,
            add_watermarker=False,
        )
    return save(pipeline, path, generation_config)


def make_sdxl_refiner(
    path: Path,
    *,
    seed: int = 0,
    in_channels: int = 4,
    clip_tokens: int = 12,
    scheduler: dict[str, Any] | None = None,
    scheduler_class: Any = DDIMScheduler,
    native_size: int = 128,
    vae: AutoencoderKL | None = None,
) -> Path:
    """As `make_sdxl`, but a StableDiffusionXLImg2ImgPipeline like SDXL's refiner: with the second text encoder alone,
    and conditioned on an aesthetic score. vae: by default one of its own."""
    width = 24
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer(clip_tokens)
        pipeline = StableDiffusionXLImg2ImgPipeline(
            scheduler=_noise_scheduler(scheduler_class, scheduler),
            vae=vae or _sd_vae(native_size),
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=clip_encoder(tokenizer, clip_tokens, width, CLIPTextModelWithProjection),
            tokenizer_2=tokenizer,
            unet=sdxl_unet(in_channels, width, num_encoders=1, num_ids=5, sample_size=native_size // 8),
            requires_aesthetics_score=True,
            force_zeros_for_empty_prompt=False,
            add_watermarker=False,
        )
    return save(pipeline, path, None)


def _noise_scheduler(scheduler_class: Any, config: dict[str, Any] | None) -> Any:
    if scheduler_class is FlowMatchEulerDiscreteScheduler:
        return scheduler_class(**(config or {}))
    extra = {"clip_sample": False} if scheduler_class is DDIMScheduler else {}
    return scheduler_class(**(NOISE_SCHEDULE | extra | (config or {})))


def sd_unet(in_channels: int, width: int, **options: Any) -> UNet2DConditionModel:
    """A small UNet of Stable Diffusion 1 or 2. options: further fields of its configuration."""
    return _unet(
        in_channels,
        width,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        **options,
    )


def sdxl_unet(
    in_channels: int, width: int, num_encoders: int = 2, num_ids: int = 6, **options: Any
) -> UNet2DConditionModel:
    """A small UNet of Stable Diffusion XL, which is also conditioned on a pooled prompt and sizes. num_encoders: of
    text, whose outputs of this width it sees side by side. num_ids: numbers of its `time_ids`."""
    time_width = 8
    return _unet(
        in_channels,
        num_encoders * width,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=time_width,
        projection_class_embeddings_input_dim=width + num_ids * time_width,
        **options,
    )


def _unet(in_channels: int, text_width: int, **options: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        in_channels=in_channels,
        out_channels=4,
        layers_per_block=1,
        cross_attention_dim=text_width,
        attention_head_dim=4,
        norm_num_groups=4,
        **({"block_out_channels": (16, 32, 32)} | options),
    )


def _sd_vae(native_size: int) -> AutoencoderKL:
    return autoencoder(native_size, latent_channels=4, scaling_factor=0.18215)

"""Samples a checkpoint in batches, with classifier-free guidance if asked: for checkpoints before their distillation.

Unlike FluxFillPipeline it runs two passes with guidance, and the VAE's posterior mean stands for its sample.
"""

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import FluxFillPipeline
from torch import Tensor

from tools.train_embedded.editing import EditBatch
from tools.train_embedded.flow import Text, read_captions
from tools.train_embedded.layout import IMAGE_TOKENS, LATENTS, TEXT_TOKENS, image_ids, pack, pack_mask, unpack
from tools.train_embedded.masks import Mask
from tools.train_embedded.scenes import Pixels
from tools.train_embedded.tokenizing import Tokenizers


def with_guidance(pipeline: FluxFillPipeline, steps: int, scale: float = 1.0, batch: int = 20) -> EditBatch:
    """Edit with the pipeline's parts, in their dtype. scale: of guidance; 1 is none, and one pass."""

    def run(
        images: Sequence[Pixels], masks: Sequence[Mask], prompts: Sequence[str], seeds: Sequence[int]
    ) -> list[Pixels]:
        edited: list[Pixels] = []
        for start in range(0, len(images), batch):
            part = slice(start, start + batch)
            edited += _edit(pipeline, steps, scale, images[part], masks[part], prompts[part], seeds[part])
        return edited

    return run


@torch.no_grad()
def _edit(
    pipeline: FluxFillPipeline,
    steps: int,
    scale: float,
    images: Sequence[Pixels],
    masks: Sequence[Mask],
    prompts: Sequence[str],
    seeds: Sequence[int],
) -> list[Pixels]:
    tokenizers = Tokenizers(pipeline.tokenizer, pipeline.tokenizer_2)
    asked = read_captions(pipeline.text_encoder, pipeline.text_encoder_2, *tokenizers(list(prompts)))
    free = read_captions(pipeline.text_encoder, pipeline.text_encoder_2, *tokenizers([""] * len(prompts)))
    pictures = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
    holes = torch.from_numpy(np.stack(masks)).float()
    condition = torch.cat([encoded(pipeline, pictures * (1 - holes[:, None])), pack_mask(holes).to(pipeline.dtype)], -1)
    noises = [torch.randn(IMAGE_TOKENS, LATENTS, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    latents = torch.stack(noises)
    times = torch.linspace(1, 0, steps + 1)
    for now, after in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        moved = _velocity(pipeline, latents, condition, now, asked)
        if scale != 1.0:
            unasked = _velocity(pipeline, latents, condition, now, free)
            moved = unasked + scale * (moved - unasked)
        latents = latents + (after - now) * moved
    new = decoded(pipeline, latents)
    return [np.where(mask[..., None], x, old) for x, old, mask in zip(new, images, masks, strict=True)]


def _velocity(pipeline: FluxFillPipeline, latents: Tensor, condition: Tensor, time: float, text: Text) -> Tensor:
    out: Tensor = pipeline.transformer(
        hidden_states=torch.cat([latents.to(pipeline.dtype), condition], -1),
        encoder_hidden_states=text.words,
        pooled_projections=text.pooled,
        timestep=torch.full((len(latents),), time, dtype=pipeline.dtype),
        img_ids=image_ids(),
        txt_ids=torch.zeros(TEXT_TOKENS, 3),
        return_dict=False,
    )[0]
    return out.float()


def encoded(pipeline: FluxFillPipeline, pictures: Tensor) -> Tensor:
    """Packed latents [batch, 256, 64] of pictures [batch, 3, 256, 256] in -1..1, in the pipeline's dtype."""
    vae = pipeline.vae
    latents = vae.encode(pictures.to(pipeline.dtype)).latent_dist.mode()
    return pack((latents - vae.config.shift_factor) * vae.config.scaling_factor)


def decoded(pipeline: FluxFillPipeline, tokens: Tensor) -> list[Pixels]:
    """Pictures of packed latents [batch, 256, 64]."""
    vae = pipeline.vae
    latents = unpack(tokens.to(pipeline.dtype)) / vae.config.scaling_factor + vae.config.shift_factor
    pictures = vae.decode(latents).sample.float().clamp(-1, 1)
    pixels = ((pictures + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
    return list(pixels.numpy())

"""Small random checkpoints in the diffusers layout, with real VAE, text encoders and tokenizers.

Random weights make a strict test of parity: every term matters, nothing is near zero.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxFillPipeline, FluxTransformer2DModel
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

WORDS = [
    "a",
    "the",
    "red",
    "blue",
    "green",
    "striped",
    "dotted",
    "plain",
    "shirt",
    "dress",
    "coat",
    "hat",
    "person",
    "with",
    "and",
    "of",
    "make",
    "it",
    "wearing",
]


def make_flux_fill(
    path: Path,
    *,
    seed: int = 0,
    text_tokens: int = 16,
    clip_tokens: int = 12,
    width: int = 64,
    guidance_embeds: bool = False,
    scheduler: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    native_size: int = 128,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a FluxFillPipeline of random weights to `path` and return it: 1.5 MB, an edit takes milliseconds."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer, tokenizer_2 = clip_tokenizer(clip_tokens), t5_tokenizer(text_tokens)
        pipeline = FluxFillPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**(scheduler or {})),
            vae=_vae(native_size).to(dtype),
            text_encoder=_clip(tokenizer, clip_tokens, width).to(dtype),
            tokenizer=tokenizer,
            text_encoder_2=_t5(tokenizer_2, width).to(dtype),
            tokenizer_2=tokenizer_2,
            transformer=flux_transformer(width, guidance_embeds).to(dtype),
        )
    pipeline.save_pretrained(path)
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return path


def clip_tokenizer(length: int) -> CLIPTokenizer:
    """A byte-level BPE of single letters: it spells every prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(letter + "</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=length)


def t5_tokenizer(length: int) -> T5TokenizerFast:
    """A unigram of a few words and the letters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    pieces += [("▁" + word, -3.0) for word in WORDS]
    pieces += [(letter, -8.0) for letter in string.ascii_letters + string.digits + ".,-'!?"]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, additional_special_tokens=[], model_max_length=length)


def _vae(native_size: int) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        mid_block_add_attention=False,
        sample_size=native_size,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _clip(tokenizer: CLIPTokenizer, length: int, width: int) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return CLIPTextModel(config)


def _t5(tokenizer: T5TokenizerFast, width: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return T5EncoderModel(config)


def flux_transformer(width: int, guidance_embeds: bool) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=384,
        out_channels=64,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=width,
        pooled_projection_dim=width,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(8, 12, 12),
    )

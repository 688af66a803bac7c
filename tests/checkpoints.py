"""Small random checkpoints in the diffusers layout, with real VAE, text encoders and tokenizers.

Random weights make a strict test of parity: every term matters, nothing is near zero.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
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


def make_flux_fill(path: Path, **options: Any) -> Path:
    """Write a FluxFillPipeline of random weights to `path` and return it: 1.5 MB, an edit takes milliseconds. options:
    as for `_make_flux`."""
    return _make_flux(path, FluxFillPipeline, in_channels=384, **options)


def make_flux(path: Path, **options: Any) -> Path:
    """Likewise a FluxPipeline, as FLUX.1 dev (with guidance_embeds) and schnell are."""
    return _make_flux(path, FluxPipeline, in_channels=64, **options)


def _make_flux(
    path: Path,
    pipeline_class: Any,
    *,
    in_channels: int,
    seed: int = 0,
    text_tokens: int = 16,
    clip_tokens: int = 12,
    width: int = 64,
    guidance_embeds: bool = False,
    scheduler: dict[str, Any] | None = None,
    scheduler_class: Any = FlowMatchEulerDiscreteScheduler,
    generation_config: dict[str, Any] | None = None,
    native_size: int = 128,
    dtype: torch.dtype = torch.float32,
) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer, tokenizer_2 = clip_tokenizer(clip_tokens), t5_tokenizer(text_tokens)
        pipeline = pipeline_class(
            scheduler=scheduler_class(**(scheduler or {})),
            vae=_vae(native_size).to(dtype),
            text_encoder=_clip(tokenizer, clip_tokens, width).to(dtype),
            tokenizer=tokenizer,
            text_encoder_2=_t5(tokenizer_2, width).to(dtype),
            tokenizer_2=tokenizer_2,
            transformer=flux_transformer(width, guidance_embeds, in_channels).to(dtype),
        )
    return _save(pipeline, path, generation_config)


def make_sd3(
    path: Path,
    *,
    seed: int = 0,
    text_tokens: int = 16,
    has_t5: bool = True,
    qk_norm: str | None = "rms_norm",
    dual_attention_layers: tuple[int, ...] = (0,),
    scheduler: dict[str, Any] | None = None,
    scheduler_class: Any = FlowMatchEulerDiscreteScheduler,
    generation_config: dict[str, Any] | None = None,
    native_size: int = 128,
) -> Path:
    """Write a StableDiffusion3Pipeline of random weights to `path` and return it: by default in the manner of 3.5
    medium; 3.5 large has no second attentions, 3 no norms of queries and keys either."""
    width, clip_width, clip_tokens = 64, 24, 12
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer, tokenizer_3 = clip_tokenizer(clip_tokens), t5_tokenizer(text_tokens)
        clips = [_clip(tokenizer, clip_tokens, clip_width, CLIPTextModelWithProjection) for _ in range(2)]
        pipeline = StableDiffusion3Pipeline(
            scheduler=scheduler_class(**({"shift": 3.0} if scheduler is None else scheduler)),
            vae=_vae(native_size),
            text_encoder=clips[0],
            tokenizer=tokenizer,
            text_encoder_2=clips[1],
            tokenizer_2=tokenizer,
            text_encoder_3=_t5(tokenizer_3, width) if has_t5 else None,
            tokenizer_3=tokenizer_3 if has_t5 else None,
            transformer=sd3_transformer(width, 2 * clip_width, qk_norm, dual_attention_layers, native_size // 8),
        )
    return _save(pipeline, path, generation_config)


def _save(pipeline: Any, path: Path, generation_config: dict[str, Any] | None) -> Path:
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


def _clip(tokenizer: CLIPTokenizer, length: int, width: int, model: Any = CLIPTextModel) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2 if model is CLIPTextModelWithProjection else 1,
        num_attention_heads=4,
        max_position_embeddings=length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return model(config)


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


def flux_transformer(width: int, guidance_embeds: bool, in_channels: int = 384) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=in_channels,
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


def sd3_transformer(
    width: int,
    pooled_width: int,
    qk_norm: str | None = "rms_norm",
    dual_attention_layers: tuple[int, ...] = (0,),
    sample_size: int = 16,
) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=sample_size,
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=width,
        caption_projection_dim=64,
        pooled_projection_dim=pooled_width,
        pos_embed_max_size=24,
        dual_attention_layers=dual_attention_layers,
        qk_norm=qk_norm,
    )

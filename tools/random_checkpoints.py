"""Writes small random checkpoints of FLUX, FLUX.2-klein, Stable Diffusion 3, Qwen-Image and Z-Image in the diffusers
layout, for tests.

They have all parts of real ones: VAE, text encoders, tokenizers. Random weights make parity tests strict, since no term
is near zero.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

PICTURE_SIZE = {"shortest_edge": 2 * 28 * 28, "longest_edge": 16 * 28 * 28}
"""Bounds on the number of pixels that Qwen2.5-VL gets of a picture."""

QWEN_SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
}

KLEIN_SCHEDULER = {"use_dynamic_shifting": True, "shift": 3.0}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen3's, for messages of text alone."""

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
    """Write a FluxFillPipeline with random weights to `path`, and return `path`. It has 1.5 MB, and an edit takes
    milliseconds. options: as for `_make_flux`.
    """
    return _make_flux(path, FluxFillPipeline, in_channels=384, **options)


def make_flux(path: Path, **options: Any) -> Path:
    """As `make_flux_fill`, but a FluxPipeline: like FLUX.1 dev with guidance_embeds, else like schnell."""
    return _make_flux(path, FluxPipeline, in_channels=64, **options)


def make_flux_kontext(path: Path, **options: Any) -> Path:
    """As `make_flux`, but a FluxKontextPipeline."""
    return _make_flux(path, FluxKontextPipeline, in_channels=64, **options)


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
            text_encoder=clip_encoder(tokenizer, clip_tokens, width).to(dtype),
            tokenizer=tokenizer,
            text_encoder_2=t5_encoder(tokenizer_2, width).to(dtype),
            tokenizer_2=tokenizer_2,
            transformer=flux_transformer(width, guidance_embeds, in_channels).to(dtype),
        )
    return save(pipeline, path, generation_config)


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
    """Write a StableDiffusion3Pipeline with random weights to `path`, and return `path`. By default it is like 3.5
    medium; for 3.5 large give no dual_attention_layers, and for 3 no qk_norm either.
    """
    width, clip_width, clip_tokens = 64, 24, 12
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer, tokenizer_3 = clip_tokenizer(clip_tokens), t5_tokenizer(text_tokens)
        clips = [clip_encoder(tokenizer, clip_tokens, clip_width, CLIPTextModelWithProjection) for _ in range(2)]
        pipeline = StableDiffusion3Pipeline(
            scheduler=scheduler_class(**({"shift": 3.0} if scheduler is None else scheduler)),
            vae=_vae(native_size),
            text_encoder=clips[0],
            tokenizer=tokenizer,
            text_encoder_2=clips[1],
            tokenizer_2=tokenizer,
            text_encoder_3=t5_encoder(tokenizer_3, width) if has_t5 else None,
            tokenizer_3=tokenizer_3 if has_t5 else None,
            transformer=sd3_transformer(width, 2 * clip_width, qk_norm, dual_attention_layers, native_size // 8),
        )
    return save(pipeline, path, generation_config)


def make_qwen_edit(path: Path, **options: Any) -> Path:
    """Write a QwenImageEditPipeline with random weights to `path`, and return `path`. options: as for `_make_qwen`."""
    return _make_seeing_qwen(path, QwenImageEditPipeline, **options)


def make_qwen_edit_plus(path: Path, **options: Any) -> Path:
    """As `make_qwen_edit`, but a QwenImageEditPlusPipeline: like 2511 with zero_cond_t, else like 2509."""
    return _make_seeing_qwen(path, QwenImageEditPlusPipeline, **options)


def _make_seeing_qwen(path: Path, pipeline_class: Any, **options: Any) -> Path:
    """Write a pipeline whose text encoder sees the picture."""

    def parts(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
        return {"processor": PictureProcessor(Qwen2VLImageProcessorPil(size=PICTURE_SIZE), tokenizer)}

    path = _make_qwen(path, pipeline_class, parts, **options)
    index = json.loads((path / "model_index.json").read_text())
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def make_qwen(path: Path, **options: Any) -> Path:
    """As `make_qwen_edit`, but a QwenImagePipeline."""
    return _make_qwen(path, QwenImagePipeline, lambda _: {}, **options)


def _make_qwen(
    path: Path,
    pipeline_class: Any,
    parts: Callable[[Qwen2Tokenizer], dict[str, Any]],
    *,
    seed: int = 0,
    scheduler: dict[str, Any] | None = None,
    scheduler_class: Any = FlowMatchEulerDiscreteScheduler,
    generation_config: dict[str, Any] | None = None,
    native_size: int = 128,
    **transformer: Any,
) -> Path:
    """scheduler: its configuration, by default Qwen-Image's. transformer: options of `qwen_transformer`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = qwen_tokenizer()
        pipeline = pipeline_class(
            scheduler=scheduler_class(**(QWEN_SCHEDULER if scheduler is None else scheduler)),
            vae=_qwen_vae(),
            text_encoder=_qwen_vl(tokenizer),
            tokenizer=tokenizer,
            transformer=qwen_transformer(**transformer),
            **parts(tokenizer),
        )
    return save(pipeline, path, {"native_size": native_size} | (generation_config or {}))


def make_klein(
    path: Path,
    *,
    seed: int = 0,
    is_distilled: bool = False,
    text_layers: int = 28,
    scheduler: dict[str, Any] | None = None,
    scheduler_class: Any = FlowMatchEulerDiscreteScheduler,
    generation_config: dict[str, Any] | None = None,
    native_size: int = 128,
    **transformer: Any,
) -> Path:
    """Write a Flux2KleinPipeline with random weights to `path`, and return `path`. scheduler: its configuration, by
    default klein's. transformer: options of `flux2_transformer`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = qwen_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        text_encoder = _qwen3(tokenizer, text_layers)
        pipeline = Flux2KleinPipeline(
            scheduler=scheduler_class(**(KLEIN_SCHEDULER if scheduler is None else scheduler)),
            vae=_flux2_vae(native_size),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            transformer=flux2_transformer(**{"joint_attention_dim": 3 * text_encoder.config.hidden_size} | transformer),
            is_distilled=is_distilled,
        )
    return save(pipeline, path, {"native_size": native_size} | (generation_config or {}))


class PictureProcessor(Qwen2VLProcessor):  # type: ignore[misc]
    """Qwen2VLProcessor without its video processor, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer)

    @classmethod
    def of_checkpoint(cls, path: Path) -> PictureProcessor:
        """The processor of a checkpoint that `make_qwen_edit` wrote."""
        return cls(Qwen2VLImageProcessorPil.from_pretrained(path / "processor"), qwen_tokenizer())


def save(pipeline: Any, path: Path, generation_config: dict[str, Any] | None) -> Path:
    pipeline.save_pretrained(path)
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return path


def clip_tokenizer(length: int) -> CLIPTokenizer:
    """A byte-level BPE without merges: every prompt becomes single letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(letter + "</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=length)


def t5_tokenizer(length: int) -> T5TokenizerFast:
    """A unigram tokenizer with a few words, and letters for the rest."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    pieces += [("▁" + word, -3.0) for word in WORDS]
    pieces += [(letter, -8.0) for letter in string.ascii_letters + string.digits + ".,-'!?"]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, additional_special_tokens=[], model_max_length=length)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE without merges, and the chat template's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ("im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
    return Qwen2Tokenizer(
        vocab={letter: i for i, letter in enumerate(alphabet)},
        merges=[],
        additional_special_tokens=[f"<|{name}|>" for name in names],
    )


def _vae(native_size: int) -> AutoencoderKL:
    return autoencoder(
        native_size,
        latent_channels=16,
        mid_block_add_attention=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def autoencoder(native_size: int, **options: Any) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=native_size,
        **options,
    )


def clip_encoder(tokenizer: CLIPTokenizer, length: int, width: int, model: Any = CLIPTextModel) -> Any:
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


def t5_encoder(tokenizer: T5TokenizerFast, width: int, shape: Mapping[str, int] | None = None) -> T5EncoderModel:
    """shape: of the layers, as in T5Config; None: one small layer."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        **(shape or {"d_kv": 16, "d_ff": 2 * width, "num_layers": 1, "num_heads": 4}),
    )
    return T5EncoderModel(config)


def _qwen_vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1)


def _flux2_vae(native_size: int) -> AutoencoderKLFlux2:
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=native_size,
    )
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    return vae


def _qwen3(tokenizer: Qwen2Tokenizer, num_layers: int, model: Any = Qwen3ForCausalLM) -> Any:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        initializer_range=0.15,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return model(config)


def _qwen_vl(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    text = {
        "vocab_size": len(tokenizer),
        "initializer_range": 0.15,  # at the default of 0.02, two layers hardly change a token's embedding
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 2,
        "initializer_range": 0.15,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["image_pad"], video_token_id=ids["video_pad"]
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen_transformer(**options: Any) -> QwenImageTransformer2DModel:
    """A small transformer. options: of its configuration, besides its sizes."""
    return QwenImageTransformer2DModel(
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=64,
        axes_dims_rope=(8, 12, 12),
        **options,
    )


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


def flux2_transformer(**options: Any) -> Flux2Transformer2DModel:
    """A small transformer. options: of its configuration."""
    sizes = {
        "in_channels": 64,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": (8, 8, 8, 8),
        "guidance_embeds": False,
    }
    return Flux2Transformer2DModel(**sizes | options)


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


# ---------------------------------------------------------------------------------------------------------- Z-Image


def make_z_image(
    path: Path,
    *,
    seed: int = 0,
    scheduler: dict[str, Any] | None = None,
    scheduler_class: Any = FlowMatchEulerDiscreteScheduler,
    generation_config: dict[str, Any] | None = None,
    native_size: int = 128,
    encoder_class: Any = Qwen3Model,
    **transformer: Any,
) -> Path:
    """Write a ZImagePipeline with random weights to `path`, and return `path`. encoder_class: Qwen3's, with a head or
    without. transformer: options of `z_image_transformer`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = qwen_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        text_encoder = _qwen3(tokenizer, 3, encoder_class)
        pipeline = ZImagePipeline(
            scheduler=scheduler_class(**({"shift": 3.0} if scheduler is None else scheduler)),
            vae=_vae(native_size),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            transformer=z_image_transformer(**{"cap_feat_dim": text_encoder.config.hidden_size} | transformer),
        )
    return save(pipeline, path, {"native_size": native_size} | (generation_config or {}))


def z_image_transformer(**options: Any) -> ZImageTransformer2DModel:
    """A small transformer, whose norms and padding are random, too. options: of its configuration."""
    sizes: dict[str, Any] = {"dim": 64, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2, "n_refiner_layers": 1}
    sizes |= {"cap_feat_dim": 64, "axes_dims": [8, 12, 12], "axes_lens": [256, 64, 64]}
    module = ZImageTransformer2DModel(**sizes | options)
    for name, parameter in module.named_parameters():
        if name.endswith("pad_token"):
            torch.nn.init.normal_(parameter)
        elif parameter.ndim == 1 and name.endswith("weight"):  # of a norm
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return module

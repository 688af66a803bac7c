"""Writes small random checkpoints of the models that find masks, as transformers lays them out, for tests.

They have all files of real ones but readmes: weights, tokenizers, and what a picture is prepared with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertTokenizer,
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    CLIPTextConfig,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    MMGroundingDinoConfig,
    MMGroundingDinoForObjectDetection,
    Sam2Config,
    Sam2HieraDetConfig,
    Sam2MaskDecoderConfig,
    Sam2Model,
    Sam2PromptEncoderConfig,
    Sam2VisionConfig,
    Sam3Config,
    Sam3Model,
    Sam3ViTConfig,
    SwinConfig,
)

from tools.random_checkpoints import WORDS, clip_tokenizer

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}

BERT_TOKENS = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, ".": 1012, "?": 1029}
"""Token of BERT's vocabulary -> its number. Grounding DINO's code knows the last four by their numbers."""

LENGTH = 32
"""Tokens of a text."""


def make_clipseg(path: Path, *, seed: int = 0, things: Sequence[str] = (), size: int = 64) -> Path:
    """Write a CLIPSeg with random weights to `path`, and return `path`. things: nouns for things.json; none: no such
    file. size: side in pixels of the square that a picture becomes."""
    tokenizer = clip_tokenizer(LENGTH)
    layers = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPSegConfig(
        text_config=layers | _tokens(tokenizer),
        vision_config=layers | {"image_size": size, "patch_size": 8},
        projection_dim=32,
        extract_layers=[0, 1],
        reduce_dim=16,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )
    _save(path, CLIPSegForImageSegmentation, config, seed)
    _write(path, "preprocessor_config.json", {**_square(size), **IMAGENET, "image_processor_type": "ViTImageProcessor"})
    tokenizer.save_pretrained(path)
    if things:
        _write(path, "things.json", list(things))
    return path


def make_sam2(path: Path, *, seed: int = 0, is_video: bool = False) -> Path:
    """Write a SAM 2 for pictures of 64 by 64 pixels with random weights to `path`, and return `path`. is_video: whether
    its config.json is that of a model for videos, as in the checkpoints that Meta publishes."""
    size = 64
    backbone = Sam2HieraDetConfig(
        hidden_size=8,
        image_size=[size, size],
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[8, 16, 32, 64],
        num_attention_heads_per_stage=[1, 1, 2, 2],
        window_size_per_stage=[4, 4, 4, 2],
        global_attention_blocks=[3],
    )
    vision = Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[64, 32, 16, 8],
        backbone_feature_sizes=[[size // 4] * 2, [size // 8] * 2, [size // 16] * 2],
        fpn_hidden_size=32,
    )
    config = Sam2Config(
        vision_config=vision,
        prompt_encoder_config=Sam2PromptEncoderConfig(hidden_size=32, image_size=size, mask_input_channels=4),
        mask_decoder_config=Sam2MaskDecoderConfig(
            hidden_size=32, mlp_dim=48, num_attention_heads=4, iou_head_hidden_dim=32
        ),
    )
    _save(path, Sam2Model, config, seed)
    if is_video:
        _rewrite(path, model_type="sam2_video", architectures=["Sam2VideoModel"], num_maskmem=7)
    _write(
        path, "preprocessor_config.json", {**_square(size), **IMAGENET, "image_processor_type": "Sam2ImageProcessor"}
    )
    _write(path, "processor_config.json", {"processor_class": "Sam2Processor", "target_size": size})
    return path


def make_sam3(path: Path, *, seed: int = 0, is_video: bool = False) -> Path:
    """Write a SAM 3 for pictures of 64 by 64 pixels with random weights to `path`, and return `path`. is_video: whether
    its files are those of a model for videos, as in the checkpoint that Meta publishes; it has no tracker even so."""
    tokenizer, size, width = clip_tokenizer(LENGTH), 64, 32
    layers = {"hidden_size": width, "intermediate_size": 48, "num_attention_heads": 4}
    backbone = Sam3ViTConfig(
        **layers,
        num_hidden_layers=2,
        image_size=size,
        patch_size=8,
        window_size=4,
        global_attn_indexes=[1],
        pretrain_image_size=32,
    )
    vision = {"fpn_hidden_size": width, "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]}
    config = Sam3Config(
        vision_config=vision | {"backbone_config": backbone.to_dict()},
        text_config=CLIPTextConfig(
            **layers, num_hidden_layers=1, projection_dim=16, **_tokens(tokenizer), hidden_act="gelu"
        ).to_dict(),
        geometry_encoder_config=layers | {"num_layers": 1, "roi_size": 3},
        detr_encoder_config=layers | {"num_layers": 1},
        detr_decoder_config=layers | {"num_layers": 2, "num_queries": 12},
        mask_decoder_config={"hidden_size": width, "num_attention_heads": 4},
    )
    _save(path, Sam3Model, config, seed, prefix="detector_model." if is_video else "")
    if is_video:
        _write(path, "config.json", _as_video(json.loads((path / "config.json").read_text("utf-8"))))
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "Sam3ImageProcessor"}
    image_processor = {**_square(size), **half}
    _write(path, "processor_config.json", {"processor_class": "Sam3Processor", "image_processor": image_processor})
    tokenizer.save_pretrained(path)
    return path


def make_grounding_dino(path: Path, *, seed: int = 0, is_mm: bool = False) -> Path:
    """Write a Grounding DINO with random weights to `path`, and return `path`. A picture's shorter side becomes 64
    pixels, and its longer one at most 96. is_mm: whether it is of MMDetection's kind."""
    tokenizer = _bert_tokenizer()
    layers = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    backbone = SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_indices=[2, 3, 4],
    )
    config = (MMGroundingDinoConfig if is_mm else GroundingDinoConfig)(
        backbone_config=backbone.to_dict(),
        text_config=BertConfig(**layers, vocab_size=len(tokenizer), max_position_embeddings=64).to_dict(),
        d_model=32,
        num_queries=12,
        max_text_len=48,
        encoder_layers=1,
        encoder_ffn_dim=32,
        encoder_attention_heads=4,
        decoder_layers=2,
        decoder_ffn_dim=32,
        decoder_attention_heads=4,
    )
    _save(path, MMGroundingDinoForObjectDetection if is_mm else GroundingDinoForObjectDetection, config, seed)
    sides = {"size": {"shortest_edge": 64, "longest_edge": 96}, "do_pad": True}
    kind = {"image_processor_type": "GroundingDinoImageProcessor"}
    _write(path, "preprocessor_config.json", {**_square(64), **sides, **IMAGENET, **kind})
    tokenizer.save_pretrained(path)
    return path


def _bert_tokenizer() -> BertTokenizer:
    """Knows some words and all letters; its special tokens and marks have the numbers of BERT's."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    known = [*letters, *(f"##{letter}" for letter in letters), *(word for word in WORDS if len(word) > 1)]
    vocab = {f"[unused{number}]": number for number in range(BERT_TOKENS["?"])}
    vocab = {token: number for token, number in vocab.items() if number not in BERT_TOKENS.values()} | BERT_TOKENS
    vocab |= {word: BERT_TOKENS["?"] + 1 + i for i, word in enumerate(known)}
    return BertTokenizer(vocab=vocab, model_max_length=64)


def _tokens(tokenizer: Any) -> dict[str, int]:
    """Entries of a text encoder's configuration that say what its tokenizer makes."""
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": LENGTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }


def _square(size: int) -> dict[str, Any]:
    """Entries of a preprocessor_config.json for pictures that become a square."""
    steps = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "resample": 2}
    return {"size": {"height": size, "width": size}, **steps}


def _save(path: Path, model: Any, config: Any, seed: int, prefix: str = "") -> None:
    """Write a model with random weights. prefix: of their names."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = model(config)
        _randomise(module)
    weights = {prefix + name: tensor for name, tensor in module.state_dict().items()} if prefix else None
    module.save_pretrained(path, state_dict=weights)


def _randomise(module: nn.Module) -> None:
    """Make all weights so large that no layer's output is near zero."""
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            parameter.data += 0.2 * torch.randn_like(parameter)


def _as_video(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a SAM 3 for videos, whose detector has this one."""
    return {"architectures": ["Sam3VideoModel"], "model_type": "sam3_video", "detector_config": config}


def _rewrite(path: Path, **entries: Any) -> None:
    config = json.loads((path / "config.json").read_text("utf-8"))
    _write(path, "config.json", config | entries)


def _write(path: Path, name: str, content: Any) -> None:
    (path / name).write_text(json.dumps(content), "utf-8")

"""A FLUX checkpoint without weights: folders of configurations, and weights that are drawn on the device when a part is
loaded. 12 billion parameters lie on no disk and never pass through the host.

Transformer and VAE have FLUX.1-dev's shape. The text encoders have one layer, unless T5 is to be whole: a prompt is
embedded once for all edits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import nn

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.sizes import FluxSize
from tools.random_checkpoints import clip_encoder, clip_tokenizer, t5_encoder, t5_tokenizer

CLIP_TOKENS = 77
CLASSES = {
    "scheduler": "FlowMatchEulerDiscreteScheduler",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "tokenizer": "CLIPTokenizer",
    "text_encoder_2": "T5EncoderModel",
    "tokenizer_2": "T5TokenizerFast",
    "transformer": "FluxTransformer2DModel",
}


class RandomFlux:
    """The parts of a checkpoint. has_whole_t5: T5 has FLUX.1-dev's shape, too."""

    def __init__(self, bench: Bench, *, has_whole_t5: bool = False) -> None:
        self._bench, size = bench, bench.size.flux
        tokenizer, tokenizer_2 = clip_tokenizer(CLIP_TOKENS), t5_tokenizer(size.text_tokens)
        self._tokenizers = {"tokenizer": tokenizer, "tokenizer_2": tokenizer_2}
        pooled, joint = _widths(size)
        self._modules: dict[str, Callable[[], Any]] = {
            "transformer": lambda: FluxTransformer2DModel(**size.transformer),
            "vae": lambda: AutoencoderKL(**size.autoencoder),
            "text_encoder": lambda: clip_encoder(tokenizer, CLIP_TOKENS, pooled),
            "text_encoder_2": lambda: t5_encoder(tokenizer_2, joint, size.t5 if has_whole_t5 else None),
        }

    def save(self, path: Path) -> Path:
        """Write what a checkpoint has beside its weights, and return `path`."""
        path.mkdir()
        (path / "model_index.json").write_text(
            json.dumps({"_class_name": "FluxPipeline"} | {part: ["", name] for part, name in CLASSES.items()})
        )
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(path / "scheduler")
        for part, tokenizer in self._tokenizers.items():
            tokenizer.save_pretrained(path / part)
        for part, make in self._modules.items():
            with torch.device("meta"):
                module = make()
            if isinstance(module, FluxTransformer2DModel | AutoencoderKL):
                module.save_config(path / part)
            else:
                module.config.save_pretrained(path / part)
        return path

    def make(self, part: str) -> nn.Module:
        """A part's module on the device, with random weights."""
        module: nn.Module = self._bench.make(self._modules[part])
        return module


def _widths(size: FluxSize) -> tuple[int, int]:
    """Widths of the pooled prompt and of its tokens; FLUX.1-dev's by default."""
    config = size.transformer
    return config.get("pooled_projection_dim", 768), config.get("joint_attention_dim", 4096)

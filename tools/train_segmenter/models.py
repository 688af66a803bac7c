"""Builds the segmenter: transformers' CLIPSeg in a small size, its tokenizer and its image processor."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    ViTImageProcessorPil,
)

from tools.train_embedded.scenes import SIZE
from tools.train_embedded.tokenizing import clip_tokenizer
from tools.train_segmenter.prompts import words

TEXT_TOKENS = 24  # of a prompt, start and end included


@dataclass(frozen=True)
class Sizes:
    """Widths are numbers of channels; the attention heads of the picture are 32 channels wide."""

    patch: int = 8  # pixels; the decoder has a channel for each pixel of a patch
    vision: int = 128
    vision_layers: int = 4
    text: int = 96
    text_layers: int = 2
    shared: int = 64  # the width of an embedded prompt
    extracted: tuple[int, ...] = (0, 2, 3)  # layers of the picture's encoder that the decoder reads
    decoder: int = 64


def build_model(tokenizer: PreTrainedTokenizerBase, sizes: Sizes) -> CLIPSegForImageSegmentation:
    """A model with random weights. At first a prompt scales the decoder's channels by about 1, not by about 0, and
    neighbouring patches have similar positions.
    """
    text = {
        "vocab_size": len(tokenizer), "hidden_size": sizes.text, "intermediate_size": 2 * sizes.text,
        "num_hidden_layers": sizes.text_layers, "num_attention_heads": 4, "hidden_act": "gelu",
        "max_position_embeddings": TEXT_TOKENS, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    vision = {
        "hidden_size": sizes.vision, "intermediate_size": 4 * sizes.vision, "num_hidden_layers": sizes.vision_layers,
        "num_attention_heads": sizes.vision // 32, "image_size": SIZE, "patch_size": sizes.patch, "hidden_act": "gelu",
    }  # fmt: skip
    config = CLIPSegConfig(
        text_config=text, vision_config=vision, projection_dim=sizes.shared, extract_layers=sizes.extracted,
        reduce_dim=sizes.decoder, decoder_num_attention_heads=2, decoder_intermediate_size=4 * sizes.decoder,
    )  # fmt: skip
    model = CLIPSegForImageSegmentation(config)
    nn.init.ones_(model.decoder.film_mul.bias)
    nn.init.normal_(model.decoder.transposed_convolution.weight, std=0.02)
    embeddings = model.clip.vision_model.embeddings
    nn.init.normal_(embeddings.patch_embedding.weight, std=(3 * sizes.patch**2) ** -0.5)
    embeddings.position_embedding.weight.data[1:] = waves(SIZE // sizes.patch, sizes.vision) / 2
    return model


def waves(grid: int, width: int) -> Tensor:
    """Sines and cosines of a patch's row and column, [grid * grid, width]: a quarter of the channels each."""
    frequencies = math.pi / 2 ** torch.linspace(0, math.log2(grid), width // 4)
    angles = (torch.arange(grid)[:, None] + 0.5) * frequencies
    of_place = torch.cat([angles.sin(), angles.cos()], dim=1)  # [grid, width / 2]
    rows, columns = of_place[:, None].expand(-1, grid, -1), of_place[None].expand(grid, -1, -1)
    return torch.cat([rows, columns], dim=-1).flatten(0, 1)


def tokenizer_in(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in `folder`; built and saved by the first call, since each build orders its ids anew."""
    if not folder.exists():
        clip_tokenizer(words()).save_pretrained(folder)
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    for key in ("is_local", "local_files_only"):  # set by this load; not part of the checkpoint
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer


def image_processor() -> ViTImageProcessorPil:
    """Resizes to 256x256 and maps pixels to -1..1."""
    side = {"height": SIZE, "width": SIZE}
    return ViTImageProcessorPil(size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3)

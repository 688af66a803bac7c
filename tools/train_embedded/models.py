"""Builds the embedded model's denoiser and text encoders: diffusers' and transformers' classes in small sizes, with
10.2M and 0.8M parameters.
"""

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerBase, T5Config, T5EncoderModel

from tools.train_embedded.layout import LATENTS, MASK, TEXT_TOKENS

HEADS, HEAD_WIDTH = 4, 64
DOUBLE_BLOCKS, SINGLE_BLOCKS = 2, 5
TEXT_WIDTH, TEXT_LAYERS = 128, 2
ROPE_AXES = (16, 24, 24)


def build_transformer() -> FluxTransformer2DModel:
    """Modulations and the output projection start at zero, so every block starts as the identity."""
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=2 * LATENTS + MASK,
        out_channels=LATENTS,
        num_layers=DOUBLE_BLOCKS,
        num_single_layers=SINGLE_BLOCKS,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=ROPE_AXES,
    )
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and is_modulation(name):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def is_modulation(name: str) -> bool:
    """Whether a module or parameter name belongs to an adaptive norm's linear layer."""
    parts = name.split(".")
    return "linear" in parts and any(part.startswith("norm") for part in parts)


def build_text_encoders(
    clip_tokenizer: PreTrainedTokenizerBase, t5_tokenizer: PreTrainedTokenizerBase
) -> tuple[CLIPTextModel, T5EncoderModel]:
    end = clip_tokenizer.eos_token_id
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tokenizer), hidden_size=TEXT_WIDTH, intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH, num_hidden_layers=TEXT_LAYERS, num_attention_heads=4,
            max_position_embeddings=TEXT_TOKENS, eos_token_id=end, pad_token_id=end,
            bos_token_id=clip_tokenizer.bos_token_id,
        )
    )  # fmt: skip
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=(len(t5_tokenizer) + 7) // 8 * 8, d_model=TEXT_WIDTH, d_kv=32, d_ff=2 * TEXT_WIDTH,
            num_layers=TEXT_LAYERS, num_heads=4, feed_forward_proj="gated-gelu", dropout_rate=0.0,
            is_encoder_decoder=False, use_cache=False,
        )
    )  # fmt: skip
    return clip, t5


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def seeded(seed: int) -> None:
    """Seed torch, so that every rank builds the same initial weights."""
    torch.manual_seed(seed)

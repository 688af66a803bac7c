"""Builds the small UNet, from Stable Diffusion's block types, and the parts it runs with: the embedded model's VAE,
tokenizers and text encoder.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer, T5TokenizerFast

from core.config import EMBEDDED_MODEL
from tools.random_unet_checkpoints import NOISE_SCHEDULE
from tools.train_embedded.models import TEXT_WIDTH
from tools.train_embedded.tokenizing import Tokenizers
from tools.train_embedded.vae import LATENTS

EMBEDDED = Path(EMBEDDED_MODEL)
LATENT_SIDE = 32


@dataclass(frozen=True)
class Sizes:
    """Sizes of the UNet's levels, highest resolution first. Each level has half the side of the one before and, as in
    Stable Diffusion, twice the channels; not all other ratios can be served.
    """

    channels: tuple[int, ...] = (64, 128, 256)
    heads: tuple[int, ...] = (1, 2, 4)
    norm_groups: int = 16


@dataclass(frozen=True)
class Models:
    """The models that are trained."""

    unet: UNet2DConditionModel
    clip: CLIPTextModel

    def named(self) -> dict[str, nn.Module]:
        return {"unet": self.unet, "text_encoder": self.clip}

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.named().values() for parameter in module.parameters()]


def build_models(sizes: Sizes) -> Models:
    """A new UNet, and the embedded model's text encoder to continue from."""
    torch.manual_seed(0)
    clip = CLIPTextModel.from_pretrained(EMBEDDED / "text_encoder", dtype=torch.float32)
    return Models(build_unet(sizes), clip.train())


def build_unet(sizes: Sizes) -> UNet2DConditionModel:
    """An inpainting UNet, whose input is latents, mask and latents of the masked picture. The last layer of every
    residual branch is zero, so every block starts as the identity.
    """
    levels = len(sizes.channels)
    unet = UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=2 * LATENTS + 1,
        out_channels=LATENTS,
        down_block_types=("CrossAttnDownBlock2D",) * levels,
        up_block_types=("CrossAttnUpBlock2D",) * levels,
        block_out_channels=sizes.channels,
        layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=sizes.heads,
        norm_num_groups=sizes.norm_groups,
    )
    for module in unet.modules():
        if isinstance(module, ResnetBlock2D):
            _zero(module.conv2)
        elif isinstance(module, Transformer2DModel):
            _zero(module.proj_out)
    _zero(unet.conv_out)
    unet.set_attn_processor(AttnProcessor())  # scaled_dot_product_attention's backward took twice as long on a CPU
    return unet.to(memory_format=torch.channels_last)  # three times as fast in bfloat16 on a CPU


def _zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)


def build_scheduler() -> DDIMScheduler:
    """DDIM with Stable Diffusion's noise schedule and v-prediction, as in Stable Diffusion 2."""
    return DDIMScheduler(**NOISE_SCHEDULE, clip_sample=False, set_alpha_to_one=False, prediction_type="v_prediction")


def embedded_vae() -> AutoencoderKL:
    vae = AutoencoderKL.from_pretrained(EMBEDDED / "vae", torch_dtype=torch.float32)
    return vae.eval().requires_grad_(False)


def embedded_tokenizers() -> Tokenizers:
    clip, t5 = EMBEDDED / "tokenizer", EMBEDDED / "tokenizer_2"
    return Tokenizers(CLIPTokenizer.from_pretrained(clip), T5TokenizerFast.from_pretrained(t5))

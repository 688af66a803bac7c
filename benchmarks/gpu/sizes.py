"""How much is measured: the shapes of published checkpoints, and shapes so small that a CPU is through in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.micro.unet_step import CONFIGS, LAYERS

FLUX_AUTOENCODER: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "sample_size": 1024,
}
"""Of FLUX.1."""

SDXL_AUTOENCODER: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "scaling_factor": 0.13025,
    "sample_size": 1024,
}

_FEW_CHANNELS = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 64}


@dataclass(frozen=True)
class FluxSize:
    """A FLUX transformer and the edits of it. side: image tokens of a side. ratios: mask ratios of timed steps, 1 an
    exact one; batches: requests that share one.
    """

    transformer: dict[str, Any]
    autoencoder: dict[str, Any]
    side: int
    text_tokens: int
    steps: int
    keyframes: int = 5
    ratios: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0)
    batches: tuple[int, ...] = (1, 4, 8)

    @property
    def image_tokens(self) -> int:
        return self.side**2


@dataclass(frozen=True)
class SdxlSize:
    """A UNet of SDXL's kind and the edits of it, with classifier-free guidance: two rows. side: image tokens of a
    side, of 32 pixels each.
    """

    unet: dict[str, Any]
    autoencoder: dict[str, Any]
    side: int
    text_tokens: int
    steps: int
    ratio: float = 0.2

    @property
    def image_tokens(self) -> int:
        return self.side**2


@dataclass(frozen=True)
class Size:
    """rounds: every figure is the median of so many. backend: of torch.compile. has_embedded: whether the embedded
    model is checked too, or random ones alone. overhead_steps: whose scheduling is timed.
    """

    name: str
    flux: FluxSize
    sdxl: SdxlSize
    rounds: int
    backend: str
    has_embedded: bool
    overhead_steps: int
    families: tuple[str, ...] = field(default=("flux-fill", "flux", "sd3", "qwen-image-edit", "sd", "sdxl"))


FULL = Size(
    name="full",
    flux=FluxSize(
        transformer={"guidance_embeds": True},  # all else as diffusers has it by default: FLUX.1-dev
        autoencoder=FLUX_AUTOENCODER,
        side=64,
        text_tokens=512,
        steps=28,
    ),
    sdxl=SdxlSize(unet=LAYERS | CONFIGS["sdxl"], autoencoder=SDXL_AUTOENCODER, side=32, text_tokens=77, steps=30),
    rounds=5,
    backend="inductor",
    has_embedded=True,
    overhead_steps=300,
)

TINY = Size(
    name="tiny",
    flux=FluxSize(
        transformer={
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "guidance_embeds": True,
            "axes_dims_rope": (8, 12, 12),
        },
        autoencoder=FLUX_AUTOENCODER | _FEW_CHANNELS,
        side=4,
        text_tokens=4,
        steps=4,
        keyframes=3,
        ratios=(0.1, 0.2, 1.0),
        batches=(1, 2),
    ),
    sdxl=SdxlSize(
        unet=LAYERS
        | CONFIGS["sdxl"]
        | {
            "block_out_channels": (16, 32, 32),
            "layers_per_block": 1,
            "transformer_layers_per_block": (1, 1, 1),
            "attention_head_dim": 4,
            "cross_attention_dim": 32,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 1280 + 6 * 8,
            "norm_num_groups": 4,
            "sample_size": 8,
        },
        autoencoder=SDXL_AUTOENCODER | _FEW_CHANNELS,
        side=2,
        text_tokens=4,
        steps=2,
    ),
    rounds=1,
    backend="eager",
    has_embedded=False,
    overhead_steps=8,
    families=("flux-fill", "sdxl"),
)
"""To see that all of it runs; its figures mean nothing."""

SIZES = {size.name: size for size in (FULL, TINY)}

"""The families with a UNet as denoiser: Stable Diffusion 1 and 2 as in `diffusers.StableDiffusionInpaintPipeline`, SDXL
as in `diffusers.StableDiffusionXLInpaintPipeline`.

Each has two kinds of checkpoint. Inpainting checkpoints, with 9 input channels, see mask and masked picture. Plain ones
see latents alone, and after each step everything outside the mask is replaced by the template at that step's noise
level. No safety checker is run, and no watermark added.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from core.model_info import ModelInfo
from core.page_scheme import PageDtype, PageLayout
from core.patches import PatchSet
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.kernels.operators import Operators
from model_executor.models.base import (
    EncodedImage,
    EncodedText,
    ImageInputs,
    ModulationInputs,
    PrimeRow,
    Row,
    SamplingState,
    SteeredModel,
)
from model_executor.models.families.timestep_family import TimestepFamily
from model_executor.models.families.vae_family import refuse, to_image
from model_executor.models.latents import pack, unpack
from model_executor.models.parts import CLIP, TIMESTEP_SCHEDULERS, Classes, projected_clip
from model_executor.models.text import Tokens, tokenize
from model_executor.models.unet.unet import Unet
from model_executor.models.unet.unet_blocks import TOKEN_SIDE
from model_executor.models.unet.unet_layers import Layers
from model_executor.models.vae.picture_key import PictureKey
from model_executor.parallel.group import Group
from model_executor.parallel.rows import predict_rows
from model_executor.patches.adapters import LoraFormat
from model_executor.patches.module_patches import unarranged
from model_executor.patches.part_patches import AnyPatches
from model_executor.samplers.sampling import State

BLOCKS = {
    "down_block_types": {"CrossAttnDownBlock2D", "DownBlock2D"},
    "up_block_types": {"CrossAttnUpBlock2D", "UpBlock2D"},
}
"""Block types of a UNet's configuration that `unet_layers.py` can run."""

MIDDLE = "UNetMidBlock2DCrossAttn"

CLIP_WIDTH = 512
"""CLIP's hidden_size and projection_dim where its configuration has none."""

OLD, OLD_SIDE = tuple(f"0.{minor}." for minor in range(9)), 64
"""Versions of diffusers before 0.9.0, and the least side of latents that its UNets were trained on."""

UNSUPPORTED = (
    "class_embed_type",
    "num_class_embeds",
    "encoder_hid_dim_type",
    "time_cond_proj_dim",
    "time_embedding_act_fn",
    "center_input_sample",
    "only_cross_attention",
    "dual_cross_attention",
)
"""Options of a UNet's configuration that are not supported: checkpoints of other pipelines set them, and distilled ones
that take guidance as an embedding."""


class UnetFamily(TimestepFamily):
    """What all UNet families share. Guidance is classifier-free.

    Random draws: posterior noise of the image, initial noise, posterior noise of the masked image. A plain checkpoint
    does not use the last, but must draw it: a sampler that draws noise of its own continues after it. An inpainting
    checkpoint at full strength does not use the first, and its pipeline does not draw it. A run that goes on with the
    latents of other steps draws as a pipeline that is given latents as its image: initial noise, and in an inpainting
    checkpoint posterior noise of the masked image.
    """

    denoiser_part = "unet"
    classes: ClassVar[Classes] = {
        "scheduler": TIMESTEP_SCHEDULERS,
        "unet": ("UNet2DConditionModel",),
        "vae": ("AutoencoderKL",),
    }
    sees_all_latents = True
    patch = TOKEN_SIDE
    edit_control_scale: ClassVar[float] = 1.0
    """What the inpainting pipeline with a ControlNet multiplies residuals with, unless it is told."""

    added: ClassVar[str | None]
    """The UNet's addition_embed_type: its inputs besides timestep and text."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        self._unet_config = checkpoint.config("unet")
        self._check()
        self._tokenizers = [checkpoint.load(part.replace("text_encoder", "tokenizer")) for part in self.text_parts]

    def _check(self) -> None:
        """Raises ConfigError for a denoiser or a VAE that is not supported."""
        config, channels = self._unet_config, self._latent_channels
        if options := [name for name in UNSUPPORTED if config.get(name)]:
            raise refuse(self._checkpoint, f"a denoiser with {', '.join(options)} is not supported")
        unknown = {kind for name, known in BLOCKS.items() for kind in set(config.get(name, [])) - known}
        unknown |= {str(config.get("mid_block_type", MIDDLE))} - {MIDDLE}
        if unknown:
            raise refuse(self._checkpoint, f"a denoiser with {', '.join(sorted(unknown))} is not supported")
        if (uneven := self._layers.uneven_width) is not None:
            raise refuse(
                self._checkpoint,
                f"a denoiser with block_out_channels {config['block_out_channels']} is not supported: what its blocks "
                f"give for a token is cached in pages of one size, and {uneven[0]} numbers do not fill pages of "
                f"{uneven[1]}",
            )
        if config.get("addition_embed_type") != self.added:
            raise refuse(
                self._checkpoint, f"a denoiser of other addition_embed_type than {self.added} is not supported"
            )
        self._sees_mask = config.get("in_channels") == 2 * channels + 1
        if not self._sees_mask and config.get("in_channels") != channels:
            wanted = f"{channels} or {2 * channels + 1} input channels"
            raise refuse(self._checkpoint, f"a denoiser of other than {wanted} is not supported")
        if self._vae_config.get("latents_mean") is not None:
            raise refuse(self._checkpoint, "a VAE with latents_mean is not supported")

    @property
    def _denoiser_recipe(self) -> str:
        scores = " scores" if self.tells_negative else ""
        return f"Unet {self._sampling.num_train_timesteps} {self._token_size}{scores}"

    @property
    def steered(self) -> SteeredModel | None:
        return self._steered(self._unet_config, sees_mask=self._sees_mask, has_scores=self.tells_negative)

    def encode_controls(self, pictures: Sequence[Tensor], seed: int, *, is_exact: bool) -> list[Tensor]:
        """Pixels, [1, 3, height, width] in 0..1, as VaeImageProcessor without do_normalize."""
        levels = torch.full((), 255.0, dtype=torch.float32, device=self._device)  # as `to_image`
        planes = (self._here(picture).permute(2, 0, 1)[None].float() for picture in pictures)
        return [(each / levels).to(self._checkpoint.dtype) for each in planes]

    def _make_denoiser(self, module: nn.Module, operators: Operators) -> Unet:
        num_timesteps, has_scores = self._sampling.num_train_timesteps, self.tells_negative
        return Unet(module, num_timesteps, self._token_size, operators, has_scores=has_scores)

    @property
    def lora_format(self) -> LoraFormat:
        config = SimpleNamespace(**self._unet_config)  # diffusers reads its attributes
        return replace(super().lora_format, denoiser=self.denoiser_part, text_parts=self.text_parts, unet=config)

    def _outline_patches_of(self, part: str) -> AnyPatches:
        return unarranged(self._checkpoint.outline(part))

    @property
    def _trained_side(self) -> int:
        """Side of the square that it was trained on, in pixels of latents."""
        side: int = self._unet_config["sample_size"]
        return side

    def info(self, name: str) -> ModelInfo:
        native_size = self._checkpoint.defaults.native_size or self._trained_side * self._vae_scale
        return self._info(
            name,
            native_size=native_size,
            num_inference_steps=50,
            default_guidance_scale=self._guidance(7.5),
            max_text_tokens=max(tokenizer.model_max_length for tokenizer in self._tokenizers),
            has_guidance=True,
            has_true_cfg=False,
            is_guidance_cfg=True,
            extra_steps=self._sampling.extra_steps,
            rounds_strength_down=True,
            block_runs=self._layers.block_runs((native_size // self._token_size) ** 2),
            edit_control_scale=self.edit_control_scale,
        )

    # -------------------------------------------------------------------------------------------------------- text

    def _encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        """As encode_prompt, except that a prompt may be cut below the encoders' length."""
        tokens = [tokenize(t, prompt, min(max_sequence_length, t.model_max_length)) for t in self._tokenizers]
        sequence, pooled = self._embed([self._encoder(part, patches) for part in self.text_parts], tokens)
        return EncodedText(
            prompt_embeds=sequence.to(self._checkpoint.dtype),
            pooled_prompt_embeds=pooled.to(self._checkpoint.dtype),
            num_tokens=tokens[0].used,
            truncated=any(t.cut for t in tokens),
        )

    @property
    def text_recipe(self) -> str:
        return f"{super().text_recipe} {type(self)._embed.__qualname__} {self._checkpoint.dtype}"

    @abstractmethod
    def _embed(self, encoders: Sequence[Any], tokens: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """The text encoders' sequence [tokens, width] and pooled output [pooled width]. tokens: for each encoder."""

    # ------------------------------------------------------------------------------------------------------- images

    def encode_image(self, inputs: ImageInputs) -> EncodedImage:
        """As prepare_latents and prepare_mask_latents."""
        generator = torch.Generator("cpu").manual_seed(inputs.seed)
        image, mask = to_image(self._here(inputs.template)), self._here(inputs.mask)
        run = self._sampling.run(inputs.num_inference_steps, inputs.num_denoising_steps, inputs.part)
        is_whole = inputs.num_denoising_steps == inputs.num_inference_steps and not inputs.starts_over
        clean = None
        if inputs.goes_on and not self._sees_mask:
            clean = self._template_sample(inputs, image, torch.Generator("cpu").manual_seed(inputs.seed))
        elif not (inputs.goes_on or (is_whole and self._sees_mask)):
            clean = self._template_sample(inputs, image, self._of_template(inputs, generator))
        noise = self._draw_noise(inputs, self._latent_shape(image), generator)
        if inputs.goes_on:
            latents = noise
        elif is_whole or clean is None:
            latents = self._sampling.pure_noise(noise, run)
        else:
            begun = clean if inputs.start is None else self._unpacked_like(noise, inputs.start)
            latents = self._sampling.noised(begun, noise, run, 0)
        condition = outside = noise[:, :0]
        if self._sees_mask:
            masked = self._masked_sample(inputs, image, mask, generator)
            condition = torch.cat([self._latent_mask(mask).to(noise), masked], dim=1)
        elif clean is not None:
            if not inputs.goes_on:
                self._draw(self._latent_shape(image), generator)
            outside = torch.cat([clean, noise, self._latent_mask(mask).to(noise)], dim=1)
        return EncodedImage(
            latents=pack(latents, TOKEN_SIDE),
            condition=pack(condition, TOKEN_SIDE),
            outside=pack(outside, TOKEN_SIDE),
            sigmas=self._sampling.noise_levels(run).to(self._device),
            state=self._sampling.begin(run, self._of_steps(inputs, generator)),
        )

    def _posterior_sample(
        self, image: Tensor, generator: torch.Generator | None, is_exact: bool, key: PictureKey | None = None
    ) -> Tensor:
        """As the base class's, in the compute dtype, from which the VAE's may differ."""
        return super()._posterior_sample(image, generator, is_exact, key).to(self._checkpoint.dtype)

    # ---------------------------------------------------------------------------------------------------- denoising

    def modulation(self, inputs: ModulationInputs) -> Tensor | None:
        """None: embedding the timestep takes a negligible part of a step."""
        return None

    def prompt_state(self, prompt_embeds: Tensor, patches: PatchSet = ()) -> Tensor | None:
        return self._denoiser.keys_values(prompt_embeds, patches)

    def predict(self, rows: Sequence[Row], group: Group | None = None) -> list[Tensor]:
        forward = self._denoiser.forward
        return forward(rows) if group is None else predict_rows(rows, group, forward, self._checkpoint.dtype)

    @property
    def _denoiser(self) -> Unet:
        unet: Unet = self._part("unet")
        return unet

    def advance(self, sample: SamplingState, prediction: Tensor) -> tuple[Tensor, State]:
        moved, state = self._moved(sample, prediction)
        if not self._sees_mask:
            moved = self._keep_outside(sample, moved)
        return pack(moved, TOKEN_SIDE), state

    def _keep_outside(self, sample: SamplingState, moved: Tensor) -> Tensor:
        """`moved`, with everything outside the mask replaced by the template at the noise level after the step."""
        channels = self._latent_channels
        clean, noise, mask = unpack(sample.outside, sample.grid, TOKEN_SIDE).split([channels, channels, 1], dim=1)
        noised = self._sampling.noised(clean, noise, sample.state[0], sample.step + 1)
        kept: Tensor = (1 - mask) * noised + mask * moved
        return kept

    # ------------------------------------------------------------------------------------------------------ priming

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        return self._layers.page_layout(dtype)

    @cached_property
    def _layers(self) -> Layers:
        """The UNet's layers, without weights."""
        return Layers(self._checkpoint.outline("unet"))

    def prime_inputs(
        self, clean: Tensor, noise: Tensor, sigma: Tensor, references: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Latents are scaled to unit variance, as the denoiser takes them."""
        signal, share = self._sampling.shares(sigma)
        mask = clean.new_zeros(len(clean), TOKEN_SIDE**2)
        condition = torch.cat([mask, clean], dim=1) if self._sees_mask else clean[:, :0]
        return signal * clean + share * noise, condition

    def prime(self, rows: Sequence[PrimeRow], blocks: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        return self._denoiser.prime(rows, blocks)

    def encode_template(self, template: Tensor, *, cache_salt: str | None = None) -> Tensor:
        """As the base class's, in the compute dtype, from which the VAE's may differ."""
        return super().encode_template(template, cache_salt=cache_salt).to(self._checkpoint.dtype)


class StableDiffusion(UnetFamily):
    """Checkpoints whose model_index.json names StableDiffusionPipeline, or its Img2Img or Inpaint variant."""

    family = "sd"
    checkpoints = "Stable Diffusion 1.5, 2, 2.1, plain and for inpainting"
    summary = "Stable Diffusion 1 and 2: a UNet, with classifier-free guidance"
    text_parts = ("text_encoder",)
    lora_loader = "StableDiffusionLoraLoaderMixin"
    edit_control_scale = 0.5
    classes: ClassVar[Classes] = {**UnetFamily.classes, **CLIP}
    added = None

    def _load_scheduler(self) -> Any:
        """Overrides the checkpoint's scheduler configuration as the pipeline does."""
        scheduler = super()._load_scheduler()
        wanted = {"steps_offset": 1, "skip_prk_steps": True}
        scheduler.register_to_config(**{name: value for name, value in wanted.items() if name in scheduler.config})
        return scheduler

    @property
    def _trained_side(self) -> int:
        """Overrides that of an old checkpoint as the pipeline does: many say 32, and all were trained on more."""
        side = super()._trained_side
        return max(side, OLD_SIDE) if str(self._unet_config.get("_diffusers_version")).startswith(OLD) else side

    def _embed(self, encoders: Sequence[Any], tokens: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """As encode_prompt: the last layer's sequence, without a pooled output."""
        sequence: Tensor = encoders[0](tokens[0].ids.to(self._device))[0][0]
        return sequence, sequence.new_empty(0)


class StableDiffusionXL(UnetFamily):
    """Checkpoints whose model_index.json names StableDiffusionXLPipeline, or its Img2Img or Inpaint variant. Refiners
    have the second text encoder alone, and see an aesthetic score instead of the target size
    (`requires_aesthetics_score`). Where force_zeros_for_empty_prompt is set, an empty prompt (also a missing negative
    one) is embedded as zeros.
    """

    family = "sdxl"
    checkpoints = "Stable Diffusion XL, plain, for inpainting, and refiners"
    summary = "Stable Diffusion XL: a UNet that also sees the picture's size, with classifier-free guidance"
    text_parts: tuple[str, ...] = ("text_encoder", "text_encoder_2")
    lora_loader = "StableDiffusionXLLoraLoaderMixin"
    classes: ClassVar[Classes] = {**UnetFamily.classes, **CLIP, **projected_clip("_2")}
    added = "text_time"

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        self.tells_negative = bool(checkpoint.index.get("requires_aesthetics_score"))
        if not checkpoint.has("text_encoder"):
            self.text_parts = ("text_encoder_2",)
        super().__init__(checkpoint)
        self._has_zero_prompt = checkpoint.index.get("force_zeros_for_empty_prompt", True)

    def _check(self) -> None:
        """Also refuses a denoiser for other text encoders, such as a refiner's, and as `_get_add_time_ids` for another
        number of inputs besides timestep and text."""
        super()._check()
        config, encoders = self._unet_config, [self._checkpoint.config(part) for part in self.text_parts]
        text, has = sum(each.get("hidden_size", CLIP_WIDTH) for each in encoders), config.get("cross_attention_dim")
        if has not in (text, [text] * len(config["down_block_types"])):
            raise refuse(
                self._checkpoint,
                f"a denoiser with cross_attention_dim {has} does not fit text encoders of width {text}",
            )
        pooled = encoders[-1].get("projection_dim", CLIP_WIDTH)
        number, width = 5 if self.tells_negative else 6, config.get("addition_time_embed_dim") or 0
        wanted, has = pooled + number * width, config.get("projection_class_embeddings_input_dim")
        if wanted != has:
            flag = f"requires_aesthetics_score is {str(self.tells_negative).lower()} in model_index.json"
            raise refuse(
                self._checkpoint,
                f"a denoiser with projection_class_embeddings_input_dim {has} does not fit the other parts, which give "
                f"{wanted}: {pooled} of text_encoder_2, and {number} times {width} since {flag}",
            )

    def prepare(self, part: str, module: nn.Module) -> Any:
        """Keeps the VAE in float32 where its configuration says force_upcast, as the pipeline does: it overflows in
        float16. In bfloat16 only its encoder."""
        if part == "vae" and self._is_widened:
            is_whole = self._checkpoint.dtype == torch.float16
            for name, child in module.named_children():
                if is_whole or name in ("encoder", "quant_conv"):
                    child.float()
        return super().prepare(part, module)

    def recipe(self, part: str) -> str:
        return super().recipe(part) + (" in float32" if part == "vae" and self._is_widened else "")

    @property
    def _is_widened(self) -> bool:
        return self._vae_config.get("force_upcast", True) and self._checkpoint.dtype != torch.float32

    @property
    def text_recipe(self) -> str:
        return f"{super().text_recipe} {self._has_zero_prompt}"

    def _encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        text = super()._encode_text(prompt, max_sequence_length, pictures, patches)
        if prompt or not self._has_zero_prompt:
            return text
        return EncodedText(
            prompt_embeds=torch.zeros_like(text.prompt_embeds),
            pooled_prompt_embeds=torch.zeros_like(text.pooled_prompt_embeds),
            num_tokens=text.num_tokens,
            truncated=False,
        )

    def _embed(self, encoders: Sequence[Any], tokens: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """As encode_prompt: the encoders' last but one layers side by side, and the last one's pooled projection."""
        outputs = [
            encoder(t.ids.to(self._device), output_hidden_states=True)
            for encoder, t in zip(encoders, tokens, strict=True)
        ]
        sequence = torch.cat([output.hidden_states[-2][0] for output in outputs], dim=1)
        return sequence, outputs[-1][0][0]

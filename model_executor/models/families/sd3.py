"""The Stable Diffusion 3 and 3.5 family, which follows `diffusers.StableDiffusion3InpaintPipeline`.

One difference: that pipeline subtracts the VAE's shift when it encodes and, up to diffusers 0.42, does not add it when
it decodes. Here it is added, as in `StableDiffusion3Pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from core.model_info import ModelInfo
from core.patches import PatchSet
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import EncodedText, SteeredModel
from model_executor.models.families.latent_family import NoisedTemplate
from model_executor.models.families.vae_family import refuse, to_image
from model_executor.models.latents import PATCH, pack
from model_executor.models.parts import FLOW_SCHEDULERS, Classes, projected_clip, t5
from model_executor.models.text import encode_t5, tokenize
from model_executor.models.transformer.sd3_transformer import SD3Transformer
from model_executor.samplers.sampling import dynamic_shift

MAX_TEXT_TOKENS = 256
"""T5's tokens: the pipeline's default max_sequence_length. CLIP's tokens come before them and are not counted."""

MAX_SHIFT = 1.16
"""Dynamic shifting's largest shift where the scheduler's configuration has none; FLUX has another default."""


class StableDiffusion3(NoisedTemplate):
    """Checkpoints whose model_index.json names StableDiffusion3Pipeline or StableDiffusion3InpaintPipeline. Guidance is
    classifier-free. T5, the largest text encoder, may be left out: its tokens are then zeros."""

    family = "sd3"
    checkpoints = "Stable Diffusion 3 medium, 3.5 medium, 3.5 large"
    summary = "Stable Diffusion 3 and 3.5: keeps the noised template outside the mask; classifier-free guidance"
    denoiser = SD3Transformer
    lora_loader = "SD3LoraLoaderMixin"
    samples_packed = False
    chooses_sigmas = False
    classes: ClassVar[Classes] = {
        "scheduler": FLOW_SCHEDULERS,
        "transformer": ("SD3Transformer2DModel",),
        "vae": ("AutoencoderKL",),
        **projected_clip(),
        **projected_clip("_2"),
        **t5("_3"),
    }

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        channels, patch = (self._transformer_config.get(name) for name in ("in_channels", "patch_size"))
        if (channels, patch) != (self._vae_config["latent_channels"], PATCH):
            raise refuse(checkpoint, f"a denoiser of {channels} channels and patches of {patch} is not supported")
        self._has_t5 = checkpoint.has("text_encoder_3")
        self.text_parts = ("text_encoder", "text_encoder_2", *(("text_encoder_3",) if self._has_t5 else ()))
        self._tokenizers = [checkpoint.load("tokenizer"), checkpoint.load("tokenizer_2")]
        self._tokenizer_3 = checkpoint.load("tokenizer_3") if self._has_t5 else None

    def info(self, name: str) -> ModelInfo:
        length = self._tokenizer_3.model_max_length if self._tokenizer_3 else MAX_TEXT_TOKENS
        native_size = self._checkpoint.defaults.native_size
        return self._info(
            name,
            native_size=native_size or self._transformer_config["sample_size"] * self._vae_scale,
            num_inference_steps=50,
            default_guidance_scale=self._guidance(7.0),
            max_text_tokens=min(MAX_TEXT_TOKENS, length),
            extra_text_tokens=self._tokenizers[0].model_max_length,
            has_guidance=True,
            has_true_cfg=False,
            is_guidance_cfg=True,
            can_skip_steps=self._sampling.can_skip_steps,
            max_side=self._transformer_config["pos_embed_max_size"],
        )

    @property
    def text_recipe(self) -> str:
        return f"{super().text_recipe} {self._has_t5} {self._transformer_config['joint_attention_dim']}"

    def _encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        """As encode_prompt: both CLIPs' sequences side by side, padded with zeros to T5's width, then T5's sequence;
        both CLIPs' pooled outputs side by side."""
        length = self._tokenizers[0].model_max_length
        tokens = [tokenize(tokenizer, prompt, length) for tokenizer in self._tokenizers]
        clips = [
            self._encode_clip(part, t.ids) for part, t in zip(("text_encoder", "text_encoder_2"), tokens, strict=True)
        ]
        sequence = torch.cat([sequence for sequence, _ in clips], dim=1)
        t5 = sequence.new_zeros(max_sequence_length, self._transformer_config["joint_attention_dim"])
        if self._tokenizer_3 is not None:
            tokens.append(tokenize(self._tokenizer_3, prompt, max_sequence_length))
            t5 = encode_t5(self._encoder("text_encoder_3"), tokens[-1].ids)
        wide = nn.functional.pad(sequence, (0, t5.shape[1] - sequence.shape[1]))
        return EncodedText(
            prompt_embeds=torch.cat([wide, t5]),
            pooled_prompt_embeds=torch.cat([pooled for _, pooled in clips]),
            num_tokens=tokens[-1].used,
            truncated=any(t.cut for t in tokens),
        )

    def _encode_clip(self, part: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """_get_clip_prompt_embeds: last but one layer's sequence [tokens, width], and the pooled projection."""
        encoder = self._encoder(part)
        output = encoder(ids.to(self._device), output_hidden_states=True)
        return output.hidden_states[-2][0].to(encoder.dtype), output[0][0]

    @property
    def steered(self) -> SteeredModel | None:
        is_dynamic = bool(self._sampling.config.get("use_dynamic_shifting"))
        shift, scale = self._vae_config.get("shift_factor") or 0.0, self._vae_config.get("scaling_factor", 0.18215)
        return self._steered(
            self._transformer_config,
            latent_shift=shift * scale,
            why_none="diffusers has no pipeline with its dynamic shifting" if is_dynamic else "",
        )

    def encode_controls(self, pictures: Sequence[Tensor], seed: int, *, is_exact: bool) -> list[Tensor]:
        """Latents, [image tokens, latent width], the mode of the VAE's posterior: the pipelines sample them with the
        process's own generator."""
        images = (to_image(self._here(picture)) for picture in pictures)
        return [pack(self._posterior_sample(image, None, is_exact)) for image in images]

    def _timesteps(self, num_inference_steps: int, image_tokens: int) -> dict[str, Any]:
        if not self._sampling.config.get("use_dynamic_shifting"):
            return {"num_inference_steps": num_inference_steps}
        mu = dynamic_shift(self._sampling.config, image_tokens, MAX_SHIFT)
        return {"num_inference_steps": num_inference_steps, "mu": mu}

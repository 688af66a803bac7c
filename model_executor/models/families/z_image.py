"""The Z-Image family, which follows `diffusers.ZImageInpaintPipeline`, and for pictures made of nothing
`diffusers.ZImagePipeline`.

The text encoder is a language model, Qwen3, whose last layer's input the denoiser reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from core.model_info import ModelInfo
from core.patches import PatchSet
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import EncodedText, ImageInputs
from model_executor.models.families.latent_family import NoisedTemplate
from model_executor.models.families.vae_family import refuse
from model_executor.models.latents import PATCH, pack
from model_executor.models.parts import FLOW_SCHEDULERS, Classes
from model_executor.models.transformer.z_image_transformer import MULTIPLE, ZImageTransformer
from model_executor.samplers.sampling import dynamic_shift

MAX_TEXT_TOKENS = 512
"""The pipelines' default max_sequence_length, with the chat template's tokens."""


class ZImage(NoisedTemplate):
    """Checkpoints whose model_index.json names ZImagePipeline, ZImageImg2ImgPipeline or ZImageInpaintPipeline: Z-Image,
    and Z-Image-Turbo, which wants no guidance (a scale of 0) and few steps.

    Guidance is classifier-free. Its scale is 1 less than in other families: it goes from the prompt's velocity on, away
    from the negative prompt's, and there is none at 0.
    """

    family = "z-image"
    checkpoints = "Z-Image, Z-Image-Turbo"
    summary = "Z-Image and Z-Image-Turbo: keeps the noised template outside the mask; classifier-free guidance above 0"
    denoiser = ZImageTransformer
    lora_loader = "ZImageLoraLoaderMixin"
    samples_packed = False
    text_parts = ("text_encoder",)
    classes: ClassVar[Classes] = {
        "scheduler": FLOW_SCHEDULERS,
        "transformer": ("ZImageTransformer2DModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("Qwen3Model", "Qwen3ForCausalLM"),
        "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    }

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        if reason := self._why_not():
            raise refuse(checkpoint, f"a denoiser {reason} is not supported")
        self._chat = self._chat_of(checkpoint.load("tokenizer"), thinks=True)

    def _why_not(self) -> str:
        """Why the denoiser's configuration is not supported; "": it is."""
        config, channels = self._transformer_config, self._vae_config["latent_channels"]
        head_dim = config["dim"] // config["n_heads"]
        if config.get("siglip_feat_dim") is not None:
            return "with siglip_feat_dim, which also reads pictures,"
        if not config["qk_norm"]:
            return "without qk_norm"
        if config["in_channels"] != channels:
            return f"of {config['in_channels']} channels beside a VAE of {channels}"
        if (PATCH, 1) not in zip(config["all_patch_size"], config["all_f_patch_size"], strict=True):
            return f"without patches of {PATCH} pixels' side"
        if not len(config["axes_dims"]) == len(config["axes_lens"]) == 3 or sum(config["axes_dims"]) != head_dim:
            return f"whose three axes_dims do not add up to its head dim, {head_dim},"
        if config["axes_lens"][0] < MULTIPLE + 2:
            return f"with axes_lens too short for {MULTIPLE} text tokens"
        return ""

    def info(self, name: str) -> ModelInfo:
        text_positions, *sides = self._transformer_config["axes_lens"]
        return self._info(
            name,
            native_size=self._checkpoint.defaults.native_size or 1024,
            num_inference_steps=50,
            default_guidance_scale=self._guidance(5.0),
            neutral_guidance_scale=0.0,
            max_text_tokens=min(MAX_TEXT_TOKENS, (text_positions - 2) // MULTIPLE * MULTIPLE),
            extra_text_tokens=2 * (MULTIPLE - 1),  # most fillers of picture and prompt
            has_guidance=True,
            has_true_cfg=False,
            is_guidance_cfg=True,
            can_skip_steps=self._sampling.can_skip_steps,
            max_side=min(sides),
        )

    # ---------------------------------------------------------------------------------------------------------- text

    def prepare(self, part: str, module: nn.Module) -> Any:
        """Keeps the language model without its head, which would only choose words."""
        return super().prepare(part, getattr(module, "model", module) if part == "text_encoder" else module)

    def recipe(self, part: str) -> str:
        return "without head" if part == "text_encoder" else super().recipe(part)

    def _encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        """As encode_prompt, which cuts prompt and chat template together; without padding, which is dropped there."""
        tokens = self._chat.tokens(prompt, max_sequence_length)
        hidden = self._hidden_states(tokens.ids.to(self._device))
        return EncodedText(
            prompt_embeds=hidden,
            pooled_prompt_embeds=hidden.new_empty(0),
            num_tokens=tokens.used,
            truncated=tokens.cut,
        )

    def _hidden_states(self, tokens: Tensor) -> Tensor:
        """What the language model's last layer reads, [tokens, width]. tokens: [1, tokens]."""
        encoder = self._encoder("text_encoder")
        options = {"use_cache": False, "output_hidden_states": True}
        output = encoder(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)
        hidden: Tensor = output.hidden_states[-2][0]
        return hidden.to(encoder.dtype)

    # ------------------------------------------------------------------------------------------------------ sampling

    @property
    def latents_dtype(self) -> torch.dtype:
        """As the pipelines, which cast latents for the denoiser, and what it predicts to float32."""
        return torch.float32

    def _clean_and_noise(self, inputs: ImageInputs, image: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """As prepare_latents and prepare_mask_latents. Of a picture made of nothing, as ZImagePipeline's
        prepare_latents, which draws noise alone; the empty canvas is encoded where strength leaves something of it."""
        if not inputs.is_empty:
            return super()._clean_and_noise(inputs, image, generator)
        noise = pack(self._draw_noise(inputs, self._latent_shape(image), generator, torch.float32))
        is_seen = inputs.num_denoising_steps < inputs.num_inference_steps and inputs.start is None
        return pack(self._template_sample(inputs, image, generator)) if is_seen else torch.zeros_like(noise), noise

    def _timesteps(self, num_inference_steps: int, image_tokens: int) -> dict[str, Any]:
        sigmas = torch.linspace(1.0, 1 / num_inference_steps, num_inference_steps).tolist()
        return {"sigmas": sigmas, "mu": dynamic_shift(self._sampling.config, image_tokens)}

    def combine_guidance(self, predictions: Sequence[Tensor], scale: float) -> Tensor:
        wanted, *unwanted = (velocity.float() for velocity in predictions)
        return wanted + scale * (wanted - unwanted[0]) if unwanted else wanted

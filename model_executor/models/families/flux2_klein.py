"""The FLUX.2-klein family, which follows `diffusers.Flux2KleinInpaintPipeline`, with up to three references,
and `Flux2KleinPipeline` for pictures that are made of nothing. The other models of FLUX.2 have another text encoder.

Functions name the pipeline's method that they follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from core.latent_space import LatentSpace
from core.model_info import ModelInfo
from core.patches import PatchSet
from core.reference_pictures import ReferencePictures
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import EncodedText, ImageInputs
from model_executor.models.families.latent_family import NoisedTemplate
from model_executor.models.families.vae_family import refuse
from model_executor.models.latents import PATCH, pack
from model_executor.models.parts import FLOW_SCHEDULERS, Classes
from model_executor.models.transformer.flux2_transformer import Flux2Transformer
from model_executor.models.vae.flux2_vae import Flux2Vae

MAX_TEXT_TOKENS = 512
"""The pipelines' default max_sequence_length, of the whole chat. Every prompt is padded to it."""

TEXT_LAYERS = (9, 18, 27)
"""The text encoder's layers whose outputs the denoiser sees, side by side."""

STATISTICS = ("bn.running_mean", "bn.running_var")
"""Weights of the VAE by which its latents are scaled, see `Flux2Vae`."""


class Flux2Klein(NoisedTemplate):
    """Checkpoints whose model_index.json names Flux2KleinPipeline or Flux2KleinInpaintPipeline. Guidance is
    classifier-free, and in distilled ones (`is_distilled`) has no effect.

    The denoiser sees the clean template as tokens of its own, if there is one, and the references behind it. Without a
    mask everything is regenerated, as in Flux2KleinPipeline, except that strength below 1 starts from the noised
    template. The pictures' latents are the posterior's mode; the initial noise is the only random draw.
    """

    family = "flux2-klein"
    checkpoints = "FLUX.2-klein 4B and 9B, distilled and base"
    summary = "FLUX.2-klein: the denoiser sees the template; keeps the noised template outside the mask"
    denoiser = Flux2Transformer
    lora_loader = "Flux2LoraLoaderMixin"
    vae = Flux2Vae
    empty_has_conditions = False
    text_parts = ("text_encoder",)
    classes: ClassVar[Classes] = {
        "scheduler": FLOW_SCHEDULERS,
        "transformer": ("Flux2Transformer2DModel",),
        "vae": ("AutoencoderKLFlux2",),
        "text_encoder": ("Qwen3ForCausalLM",),
        "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    }

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        if reason := self._why_not():
            raise refuse(checkpoint, reason)
        self._is_distilled = bool(checkpoint.index.get("is_distilled"))
        self._tokenizer = checkpoint.load("tokenizer")
        self._chat = self._chat_of(self._tokenizer, thinks=False)

    def _why_not(self) -> str:
        """Why the configurations of the checkpoint's parts are not supported; "": they are."""
        denoiser, text = self._transformer_config, self._checkpoint.config("text_encoder")
        channels, patch = (denoiser.get(name) for name in ("in_channels", "patch_size"))
        if (channels, patch) != (self._latent_width, 1):
            return f"a denoiser of {channels} channels and patches of {patch} is not supported, with this VAE"
        axes, head_dim = denoiser.get("axes_dims_rope", (32, 32, 32, 32)), denoiser.get("attention_head_dim")
        if len(axes) != 4 or sum(axes) != head_dim:
            return f"a denoiser whose four axes_dims_rope do not add up to its head dim, {head_dim}, is not supported"
        if denoiser.get("guidance_embeds", True):
            return "a denoiser with guidance_embeds is not supported"
        if tuple(self._vae_config.get("patch_size", (PATCH, PATCH))) != (PATCH, PATCH):
            return f"a VAE with patches of {self._vae_config['patch_size']} is not supported"
        if text["num_hidden_layers"] < TEXT_LAYERS[-1]:
            return f"a text encoder of {text['num_hidden_layers']} layers is not supported: {TEXT_LAYERS[-1]} are read"
        width, wanted = len(TEXT_LAYERS) * text["hidden_size"], denoiser.get("joint_attention_dim")
        if width != wanted:
            return f"the text encoder gives {width} numbers per token, and the denoiser reads {wanted}"
        return ""

    def info(self, name: str) -> ModelInfo:
        is_guided = not self._is_distilled
        return self._info(
            name,
            native_size=self._checkpoint.defaults.native_size or 1024,
            num_inference_steps=50 if is_guided else 4,
            default_guidance_scale=self._guidance(4.0) if is_guided else 1.0,
            max_text_tokens=MAX_TEXT_TOKENS,
            has_guidance=is_guided,
            is_guidance_cfg=is_guided,
            has_true_cfg=False,
            can_skip_steps=self._sampling.can_skip_steps,
            references=ReferencePictures(most=3, pixels=1024**2, multiple=self._token_size, grows=False),
            **self._conditions_info,
        )

    @property
    def latent_space(self) -> LatentSpace:
        """The batch norm's statistics, which scale latents here, are weights of the VAE. They are compared as a digest,
        rounded, since one checkpoint may store them in bfloat16 and another in float32."""
        statistics = self._checkpoint.tensors("vae", STATISTICS)
        digest = sha256(repr([statistics[name].bfloat16().tolist() for name in STATISTICS]).encode())
        epsilon = self._vae_config.get("batch_norm_eps", 1e-4)
        scaling = {"batch_norm": digest.hexdigest()[:12], "batch_norm_eps": epsilon}
        return msgspec.structs.replace(super().latent_space, scaling=scaling)

    # -------------------------------------------------------------------------------------------------------- prompts

    def prepare(self, part: str, module: nn.Module) -> Any:
        """Drops the text encoder's layers after the last one that is read: a quarter of klein's."""
        return super().prepare(part, _shortened(module) if part == "text_encoder" else module)

    def recipe(self, part: str) -> str:
        return f"{TEXT_LAYERS[-1]} layers" if part == "text_encoder" else super().recipe(part)

    def _encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        """As _get_qwen3_prompt_embeds, which cuts prompt and chat template together."""
        chat = self._chat.tokens(prompt, max_sequence_length)
        tokens = self._tokenizer.pad(
            {"input_ids": chat.ids.tolist()},
            padding="max_length",
            max_length=max_sequence_length,
            return_tensors="pt",
        ).to(self._device)
        encoder = self._encoder("text_encoder")
        output = encoder(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            output_hidden_states=True,
            use_cache=False,
        )
        embeds = torch.cat([output.hidden_states[layer][0] for layer in TEXT_LAYERS], dim=1).to(encoder.dtype)
        return EncodedText(
            prompt_embeds=embeds,
            pooled_prompt_embeds=embeds.new_empty(0),
            num_tokens=chat.used,
            truncated=chat.cut,
        )

    # ------------------------------------------------------------------------------------------------------- sampling

    def _clean_and_noise(self, inputs: ImageInputs, image: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """As prepare_latents, which draws noise in the shape of patches. Nothing is encoded where nothing would be seen
        of it: of an empty canvas, unless its noised latents are where the run starts."""
        rows, columns = self.grid(image.shape[3], image.shape[2])
        drawn = self._draw_noise(inputs, (1, self._latent_width, rows, columns), generator)
        noise = drawn.flatten(2)[0].T.contiguous()
        is_from_noise = inputs.num_denoising_steps == inputs.num_inference_steps
        if inputs.is_empty and (is_from_noise or inputs.start is not None):
            return torch.zeros_like(noise), noise
        return pack(self._template_sample(inputs, image, None)), noise

    def _packed_mask(self, mask: Tensor) -> Tensor:
        """As prepare_mask_latents: float32 [image tokens, 1]."""
        size = self.grid(mask.shape[1], mask.shape[0])
        return nn.functional.interpolate(mask[None, None].float(), size=size, mode="bilinear").reshape(-1, 1)

    def _timesteps(self, num_inference_steps: int, image_tokens: int) -> dict[str, Any]:
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        return {"sigmas": sigmas, "mu": empirical_shift(image_tokens, num_inference_steps)}


def empirical_shift(image_tokens: int, num_steps: int) -> float:
    """`mu` of dynamic shifting, as the pipelines' compute_empirical_mu: a line over the number of tokens for 10 steps,
    one for 200, and a line between them over the number of steps; beyond 4300 tokens that for 200 alone."""
    of_200 = 0.00016927 * image_tokens + 0.45666666
    if image_tokens > 4300:
        return of_200
    of_10 = 8.73809524e-05 * image_tokens + 1.89833333
    slope = (of_200 - of_10) / 190.0
    return slope * num_steps + (of_200 - 200.0 * slope)


def _shortened(module: Any) -> Any:
    """A language model without the layers after the last that is read, and without its head. The last layer's output is
    normed, if it is the model's last one."""
    model = module.model
    if len(model.layers) > TEXT_LAYERS[-1]:
        model.layers, model.norm = model.layers[: TEXT_LAYERS[-1]], nn.Identity()
    module.lm_head = nn.Identity()
    return model

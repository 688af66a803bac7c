"""The FLUX.1 families: Fill as in `diffusers.FluxFillPipeline`, dev and schnell as in `diffusers.FluxInpaintPipeline`,
Kontext as in `diffusers.FluxKontextInpaintPipeline` and `diffusers.FluxKontextPipeline`.

Functions name the pipeline's method that they follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from core.model_info import ModelInfo
from core.patches import PatchSet
from core.reference_pictures import ReferencePictures
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import EncodedImage, EncodedText, ImageInputs, SteeredModel
from model_executor.models.families.latent_family import LatentFamily, NoisedTemplate
from model_executor.models.families.vae_family import refuse, to_image
from model_executor.models.latents import pack
from model_executor.models.parts import CLIP, FLOW_SCHEDULERS, Classes, t5
from model_executor.models.text import encode_t5, tokenize
from model_executor.models.transformer.flux_transformer import FluxKontextTransformer, FluxTransformer
from model_executor.samplers.sampling import dynamic_shift

MAX_TEXT_TOKENS = 512
"""The pipelines' limit on max_sequence_length."""


class Flux(LatentFamily):
    """What all FLUX families share: text encoders, noise levels, the denoiser. Guidance is distilled into it, in
    schnell without a scale to choose."""

    denoiser = FluxTransformer
    lora_loader = "FluxLoraLoaderMixin"
    text_parts = ("text_encoder", "text_encoder_2")
    classes: ClassVar[Classes] = {
        "scheduler": FLOW_SCHEDULERS,
        "transformer": ("FluxTransformer2DModel",),
        "vae": ("AutoencoderKL",),
        **CLIP,
        **t5("_2"),
    }
    default_steps: int
    default_guidance: float
    has_true_cfg: bool
    samples_controls = True

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        self._tokenizer = checkpoint.load("tokenizer")
        self._tokenizer_2 = checkpoint.load("tokenizer_2")

    def info(self, name: str) -> ModelInfo:
        return self._info(
            name,
            native_size=self._checkpoint.defaults.native_size or self._vae_config["sample_size"],
            num_inference_steps=self.default_steps,
            default_guidance_scale=self._guidance(self.default_guidance),
            max_text_tokens=min(MAX_TEXT_TOKENS, self._tokenizer_2.model_max_length),
            has_guidance=self._transformer_config.get("guidance_embeds", False),
            has_true_cfg=self.has_true_cfg,
            can_skip_steps=self._sampling.can_skip_steps,
        )

    def _encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        """As encode_prompt: CLIP's pooled output and T5's sequence; each cuts the prompt at its own length."""
        clip_tokens = tokenize(self._tokenizer, prompt, self._tokenizer.model_max_length)
        tokens = tokenize(self._tokenizer_2, prompt, max_sequence_length)
        clip = self._encoder("text_encoder")
        pooled = clip(clip_tokens.ids.to(self._device), output_hidden_states=False).pooler_output
        return EncodedText(
            prompt_embeds=encode_t5(self._encoder("text_encoder_2"), tokens.ids),
            pooled_prompt_embeds=pooled[0].to(clip.dtype),
            num_tokens=tokens.used,
            truncated=clip_tokens.cut or tokens.cut,
        )

    @property
    def steered(self) -> SteeredModel | None:
        return self._steered(self._transformer_config)

    def encode_controls(self, pictures: Sequence[Tensor], seed: int, *, is_exact: bool) -> list[Tensor]:
        """Latents, [image tokens, latent width], as FluxControlNetInpaintPipeline samples them, and with Fill
        FluxControlNetFillInpaintPipeline (diffusers/examples/community/pipline_flux_fill_controlnet_Inpaint.py)."""
        generator = torch.Generator("cpu").manual_seed(seed)
        images = (to_image(self._here(picture)) for picture in pictures)
        return [pack(self._posterior_sample(image, generator, is_exact)) for image in images]

    def _timesteps(self, num_inference_steps: int, image_tokens: int) -> dict[str, Any]:
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        return {"sigmas": sigmas, "mu": dynamic_shift(self._sampling.config, image_tokens)}


class FluxFill(Flux):
    """Checkpoints whose model_index.json names FluxFillPipeline: the denoiser sees the masked image and the mask.

    Random draws: posterior noise of control pictures and of the image, initial noise, posterior noise of the masked
    image. At full strength, with other latents to start from, and where the run goes on with latents of other steps,
    that of the image is drawn but unused, and the image is not encoded.
    """

    family = "flux-fill"
    checkpoints = "FLUX.1-Fill-dev, the embedded model"
    summary = "FLUX.1 Fill: the denoiser sees mask and masked picture"
    default_steps, default_guidance, has_true_cfg = 50, 30.0, False

    def encode_image(self, inputs: ImageInputs) -> EncodedImage:
        """As prepare_latents and prepare_mask_latents.

        The masked image is encoded whole, though an edit reads the condition of its active tokens only. Encoding just a
        box with 1, 2 or 3 tokens around them (51 %, 64 %, 74 % of the picture), measured on 24 edits with the embedded
        model, gave edits with an SSIM of 0.9956, 0.9979 and 0.9982 to those of the whole. That is too large an error
        for a third of the smaller half of the VAE's time.
        """
        generator = torch.Generator("cpu").manual_seed(inputs.seed)
        image, mask = to_image(self._here(inputs.template)), self._here(inputs.mask)[None, None]
        self._draw_controls(inputs, image, generator)
        rows, columns = self.grid(image.shape[3], image.shape[2])
        sigmas = self._schedule(inputs, rows * columns)
        latents = pack(self._initial_latents(inputs, image, sigmas[0], generator))
        masked = pack(self._masked_sample(inputs, image, mask, generator))
        return EncodedImage(
            latents=latents,
            condition=torch.cat([masked, self._pack_mask(mask).to(masked)], dim=1),
            outside=latents.new_empty(len(latents), 0),
            sigmas=sigmas.to(self._device),
            state=self._sampling.begin(self._of_steps(inputs, generator)),
        )

    def _initial_latents(self, inputs: ImageInputs, image: Tensor, sigma: Tensor, generator: torch.Generator) -> Tensor:
        """Noise, mixed with the latents of the image, or `start`, when sampling starts below full noise. image: the
        template, of which `to_image` has made it."""
        shape, of_template = self._latent_shape(image), self._of_template(inputs, generator)
        if sigma == 1.0 or inputs.goes_on:
            self._draw(shape, of_template)  # the posterior noise: multiplied by 0, but drawn first
            return self._draw_noise(inputs, shape, generator)
        if inputs.start is None:
            clean = self._template_sample(inputs, image, of_template)
        else:
            posterior_noise = self._draw(shape, of_template)  # drawn as diffusers does, but not used
            clean = self._unpacked_like(posterior_noise, inputs.start)
        noise = self._draw_noise(inputs, shape, generator)
        sigma = sigma.to(self._device, clean.dtype).reshape(1, 1, 1, 1)
        return sigma * noise + (1.0 - sigma) * clean

    def _pack_mask(self, mask: Tensor) -> Tensor:
        """[1, 1, height, width] -> [image tokens, pixels per token]: the mask at full resolution, as channels."""
        scale = self._vae_scale
        height, width = mask.shape[2] // scale, mask.shape[3] // scale
        pixels = mask.view(1, height, scale, width, scale).permute(0, 2, 4, 1, 3)
        return pack(pixels.reshape(1, scale * scale, height, width))

    def _unmasked_condition(self, clean: Tensor) -> Tensor:
        return torch.cat([clean, clean.new_zeros(len(clean), self._token_size**2)], dim=1)


class FluxInpaint(NoisedTemplate, Flux):
    """Checkpoints of FLUX.1 dev and schnell, whose model_index.json names FluxPipeline or FluxInpaintPipeline."""

    family = "flux"
    checkpoints = "FLUX.1-dev, FLUX.1-schnell"
    summary = "FLUX.1 dev and schnell: keeps the noised template outside the mask at every step"
    default_steps, default_guidance, has_true_cfg = 28, 7.0, True

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        channels = self._transformer_config.get("in_channels", self._latent_width)
        if channels != self._latent_width:
            raise refuse(
                checkpoint,
                f"a denoiser of {channels} input channels is not supported under {checkpoint.class_name}, which has"
                f" {self._latent_width}; that of Fill belongs under FluxFillPipeline",
            )


class FluxKontext(FluxInpaint):
    """Checkpoints of FLUX.1 Kontext, whose model_index.json names FluxKontextPipeline or FluxKontextInpaintPipeline
    (diffusers/pipelines/flux/pipeline_flux_kontext.py and pipeline_flux_kontext_inpaint.py).

    The denoiser also sees the clean template, the mode of the VAE's posterior, as tokens of its own; or a reference in
    its place, as `image_reference` of the pipeline. Without a mask
    everything is regenerated, as in FluxKontextPipeline, except that strength below 1 starts from the noised template.
    A picture that is made of nothing has no such tokens.
    """

    family = "flux-kontext"
    checkpoints = "FLUX.1-Kontext-dev"
    summary = "FLUX.1 Kontext: as FLUX.1 dev; the denoiser also sees the template"
    denoiser = FluxKontextTransformer
    samples_template = False
    references_replace_template = True
    empty_has_conditions = False
    default_guidance = 3.5
    samples_controls = False

    @property
    def steered(self) -> SteeredModel | None:
        """None: diffusers has no pipeline with a ControlNet."""
        return None

    def info(self, name: str) -> ModelInfo:
        info = super().info(name)
        references = ReferencePictures(
            most=1, pixels=info.native_size**2, multiple=info.token_size, grows=True, replaces_template=True
        )
        return msgspec.structs.replace(info, **self._conditions_info, references=references)

    def _draws_masked_image(self, inputs: ImageInputs) -> bool:
        """As FluxKontextInpaintPipeline, for a picture of which a part is kept; FluxKontextPipeline has no mask, and
        does not. Only samplers that draw noise notice it, so only for these is the mask looked at."""
        return self._sampling.draws_noise and not bool(inputs.mask.all())

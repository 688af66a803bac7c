"""FLUX.1 Fill: text and image encoding, denoising and decoding as `diffusers.FluxFillPipeline` does them.

Every function names the pipeline step it follows. Random draws come from ``torch.Generator("cpu").manual_seed(seed)``
in the pipeline's order: posterior noise of the image, initial noise, posterior noise of the masked image. At full
strength the first of these multiplies nothing: its numbers are drawn and dropped, and the image is not encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn

from core.errors import ConfigError
from core.messages import ModelInfo
from core.page_scheme import PageDtype, PageLayout
from model_executor.loader import Checkpoint
from model_executor.models.base import EncodedImage, EncodedText, PrimeRow, Row
from model_executor.models.flux_transformer import FluxTransformer
from model_executor.models.vae_region import Box, RegionDecoder, times
from model_executor.sampling import make_sigmas

MAX_TEXT_TOKENS = 512
"""FluxFillPipeline's limit on max_sequence_length."""

PATCH = 2
"""Latent pixels per token side."""


class FluxFill:
    """The family of checkpoints whose model_index.json names FluxFillPipeline."""

    components: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text_encoder": ("text_encoder", "text_encoder_2"),
        "vae": ("vae",),
        "transformer": ("transformer",),
    }

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._device = checkpoint.device
        self._vae_config = checkpoint.config("vae")
        self._vae_scale = 2 ** (len(self._vae_config["block_out_channels"]) - 1)
        self._scheduler = checkpoint.load("scheduler")
        self._tokenizer = checkpoint.load("tokenizer")
        self._tokenizer_2 = checkpoint.load("tokenizer_2")
        self._parts: dict[str, Any] = {}  # part name -> module
        self._transformer: FluxTransformer | None = None
        self._decoder: RegionDecoder | None = None
        if self._scheduler.config.get("stochastic_sampling"):
            raise ConfigError(
                f"{checkpoint.path}: stochastic sampling is not supported; set stochastic_sampling to false"
            )

    def put(self, part: str, module: nn.Module) -> None:
        self._parts[part] = module
        if part == "vae":
            # Convolutions of few channels on large maps: channels last took 0.6 of the time on one core in float32.
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # PyTorch's stub lacks it
            for activation in (layer for layer in module.modules() if isinstance(layer, nn.SiLU)):
                activation.inplace = True  # it always follows a norm, whose output nothing else reads
            self._decoder = RegionDecoder(module)
        if part == "transformer":
            self._transformer = FluxTransformer(module, self._scheduler.config.num_train_timesteps)

    def drop(self, part: str) -> None:
        del self._parts[part]
        if part == "vae":
            self._decoder = None
        if part == "transformer":
            self._transformer = None

    def info(self, name: str) -> ModelInfo:
        return ModelInfo(
            name=name,
            family="flux-fill",
            native_size=self._checkpoint.defaults.native_size or self._vae_config["sample_size"],
            token_size=self._vae_scale * PATCH,
            latent_width=self._vae_config["latent_channels"] * PATCH**2,
            max_text_tokens=min(MAX_TEXT_TOKENS, self._tokenizer_2.model_max_length),
            default_num_inference_steps=self._checkpoint.defaults.num_inference_steps,
            default_guidance_scale=self._checkpoint.defaults.guidance_scale,
            has_guidance=self._checkpoint.config("transformer").get("guidance_embeds", False),
            has_true_cfg=False,
            device=self._device.type,
            dtype=str(self._checkpoint.dtype).removeprefix("torch."),
        )

    def grid(self, width: int, height: int) -> tuple[int, int]:
        token_size = self._vae_scale * PATCH
        return height // token_size, width // token_size

    # --------------------------------------------------------------------------------------------------------- text

    def encode_text(self, prompt: str, max_sequence_length: int) -> EncodedText:
        """FluxFillPipeline.encode_prompt. Pooled output of CLIP, sequence of T5; each cuts at its own length."""
        clip_ids, _, clip_cut = _tokenize(self._tokenizer, prompt, self._tokenizer.model_max_length)
        t5_ids, num_tokens, t5_cut = _tokenize(self._tokenizer_2, prompt, max_sequence_length)
        clip, t5 = self._parts["text_encoder"], self._parts["text_encoder_2"]
        pooled = clip(clip_ids.to(self._device), output_hidden_states=False).pooler_output
        embeds = t5(t5_ids.to(self._device), output_hidden_states=False)[0]
        return EncodedText(
            prompt_embeds=embeds[0].to(t5.dtype),
            pooled_prompt_embeds=pooled[0].to(clip.dtype),
            num_tokens=num_tokens,
            truncated=clip_cut or t5_cut,
        )

    # -------------------------------------------------------------------------------------------------------- image

    def encode_image(
        self,
        template: Tensor,
        mask: Tensor,
        *,
        seed: int,
        num_inference_steps: int,
        num_denoising_steps: int,
    ) -> EncodedImage:
        """FluxFillPipeline.prepare_latents and prepare_mask_latents.

        The masked image is encoded whole, though an edit only reads the condition of its active tokens. Encoding only a
        box around these was measured on 24 edits with the embedded model: 1, 2 and 3 tokens around it, 51 %, 64 % and
        74 % of the pictures, left the finished edits at an SSIM of 0.9956, 0.9979 and 0.9982 to what they are
        otherwise. That is too much for a third of the smaller half of the VAE's time.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        image = _image(template)
        mask = mask[None, None].float()
        rows, columns = self.grid(image.shape[3], image.shape[2])
        sigmas = make_sigmas(self._scheduler, num_inference_steps, num_denoising_steps, rows * columns)
        latents = self._initial_latents(image, sigmas[0], generator)
        masked = self._posterior_sample(image * (1 - mask), generator)
        condition = torch.cat([_pack(masked), self._pack_mask(mask).to(self._device, masked.dtype)], dim=1)
        return EncodedImage(latents=_pack(latents), condition=condition, sigmas=sigmas.to(self._device))

    def encode_template(self, template: Tensor) -> Tensor:
        vae = self._parts["vae"]
        return _pack(self._scaled(vae.encode(_image(template).to(self._device, vae.dtype)).latent_dist.mode()))

    def _initial_latents(self, image: Tensor, sigma: Tensor, generator: torch.Generator) -> Tensor:
        """Noise, mixed with the image's latents when sampling does not start at full noise."""
        vae = self._parts["vae"]
        shape = (1, vae.config.latent_channels, image.shape[2] // self._vae_scale, image.shape[3] // self._vae_scale)
        if sigma == 1.0:
            self._draw(shape, generator)  # the posterior noise that nothing would be left of
            return self._draw(shape, generator)
        clean = self._posterior_sample(image, generator)
        noise = self._draw(shape, generator)
        sigma = sigma.to(self._device, vae.dtype).reshape(1, 1, 1, 1)
        return sigma * noise + (1.0 - sigma) * clean

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal numbers, drawn on the CPU in the compute dtype: the numbers depend on it."""
        noise: Tensor = randn_tensor(shape, generator=generator, device=self._device, dtype=self._checkpoint.dtype)
        return noise

    def _posterior_sample(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Scaled latents of an image in -1..1: [1, channels, height / 8, width / 8]."""
        vae = self._parts["vae"]
        return self._scaled(vae.encode(image.to(self._device, vae.dtype)).latent_dist.sample(generator))

    def _scaled(self, latents: Tensor) -> Tensor:
        """From the VAE's own range to the denoiser's."""
        config = self._parts["vae"].config
        return (latents - config.shift_factor) * config.scaling_factor  # type: ignore[no-any-return]

    def _pack_mask(self, mask: Tensor) -> Tensor:
        """[1, 1, height, width] -> [image tokens, pixels per token]: the mask at full resolution, as channels."""
        scale = self._vae_scale
        height, width = mask.shape[2] // scale, mask.shape[3] // scale
        pixels = mask.view(1, height, scale, width, scale).permute(0, 2, 4, 1, 3)
        return _pack(pixels.reshape(1, scale * scale, height, width))

    def decode(self, latents: Tensor, width: int, height: int) -> Tensor:
        """FluxFillPipeline's step 8 and VaeImageProcessor.postprocess, up to 8-bit pixels."""
        return _pixels(self._vae_decoder.decode(self._vae_latents(latents, width, height)))

    def decode_region(self, latents: Tensor, active: Tensor, width: int, height: int) -> tuple[Tensor, Box]:
        """The bounding box of the active tokens, which is all of an edit that reaches the result."""
        tokens = _bounding_box(active, self.grid(width, height)[1])
        region = self._vae_decoder.region(tokens, self.grid(width, height))
        unpacked = self._vae_latents(latents, width, height)
        left, top, right, bottom = box = times(tokens, self._vae_scale * PATCH)
        if region is None:
            return _pixels(self._vae_decoder.decode(unpacked)[:, :, top:bottom, left:right]), box
        return _pixels(self._vae_decoder.decode_region(unpacked, region)), box

    def _vae_latents(self, latents: Tensor, width: int, height: int) -> Tensor:
        """Packed latents as the VAE wants them, [1, channels, height / 8, width / 8]."""
        vae = self._parts["vae"]
        latents = latents.to(vae.dtype)  # what another rank exported has widened to float32
        unpacked = _unpack(latents, *self.grid(width, height))
        return unpacked / vae.config.scaling_factor + vae.config.shift_factor  # type: ignore[no-any-return]

    @property
    def _vae_decoder(self) -> RegionDecoder:
        if self._decoder is None:
            raise KeyError("the VAE is not loaded")
        return self._decoder

    # ------------------------------------------------------------------------------------------------------ priming

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        return self._denoiser.page_layout(dtype)

    def prime_inputs(self, clean: Tensor, content_id: str, sigma: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator("cpu").manual_seed(int(content_id[:16], 16) >> 1)
        noise = self._draw(tuple(clean.shape), generator).to(clean.device, clean.dtype)
        sigma = sigma.to(clean.device, clean.dtype)
        nothing_masked = clean.new_zeros(clean.shape[0], (self._vae_scale * PATCH) ** 2)
        return (1.0 - sigma) * clean + sigma * noise, torch.cat([clean, nothing_masked], dim=1)

    def prime(self, rows: Sequence[PrimeRow], blocks: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        return self._denoiser.prime(rows, blocks)

    # ---------------------------------------------------------------------------------------------------- denoising

    def modulation(self, pooled_prompt_embeds: Tensor, guidance_scale: float, sigmas: Tensor) -> Tensor | None:
        return self._denoiser.modulation(pooled_prompt_embeds, guidance_scale, sigmas)

    def predict(self, rows: Sequence[Row]) -> list[Tensor]:
        return self._denoiser.forward(rows)

    @property
    def _denoiser(self) -> FluxTransformer:
        if self._transformer is None:
            raise KeyError("the transformer is not loaded")
        return self._transformer

    def combine_guidance(self, predictions: Sequence[Tensor]) -> Tensor:
        """Guidance is distilled into FLUX.1 Fill: a request has one row."""
        (velocity,) = predictions
        return velocity


def _tokenize(tokenizer: Any, prompt: str, length: int) -> tuple[Tensor, int, bool]:
    """(ids [1, length], how many of them are the prompt's, whether the prompt was cut)."""
    ids = tokenizer([prompt], padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
    full = len(tokenizer(prompt).input_ids)
    return ids, min(full, length), full > length


def _image(template: Tensor) -> Tensor:
    """uint8 [height, width, 3] -> float32 [1, 3, height, width] in -1..1; VaeImageProcessor.preprocess."""
    return (template.permute(2, 0, 1)[None].float() / 255.0) * 2.0 - 1.0


def _pixels(image: Tensor) -> Tensor:
    """[1, 3, height, width] in -1..1 -> uint8 [height, width, 3]; VaeImageProcessor.postprocess."""
    image = (image * 0.5 + 0.5).clamp(0, 1)
    pixels: Tensor = (image[0].cpu().permute(1, 2, 0).float() * 255).round().to(torch.uint8)
    return pixels.contiguous()


def _bounding_box(tokens: Tensor, columns: int) -> Box:
    """Box around token indices of a grid with so many columns, in tokens."""
    x, y = tokens % columns, tokens // columns
    return int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1


def _pack(x: Tensor) -> Tensor:
    """[1, channels, height, width] -> [height / 2 * width / 2, channels * 4]; FluxFillPipeline._pack_latents."""
    _, channels, height, width = x.shape
    x = x.view(channels, height // PATCH, PATCH, width // PATCH, PATCH).permute(1, 3, 0, 2, 4)
    return x.reshape(-1, channels * PATCH**2)


def _unpack(x: Tensor, rows: int, columns: int) -> Tensor:
    """[rows * columns, channels * 4] -> [1, channels, rows * 2, columns * 2]; FluxFillPipeline._unpack_latents."""
    x = x.view(rows, columns, -1, PATCH, PATCH).permute(2, 0, 3, 1, 4)
    return x.reshape(1, -1, rows * PATCH, columns * PATCH)

"""LatentFamily: what families share whose denoiser works on patches of a VAE's latents.

Latents are packed: a token's row holds its patch, channel by channel. Random draws come from
``torch.Generator("cpu").manual_seed(seed)`` in the order of the pipeline that a family follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Self

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn

from core.errors import ConfigError
from core.messages import ModelInfo
from core.page_scheme import PageDtype, PageLayout
from model_executor.adapters import Adapter
from model_executor.loader import Checkpoint
from model_executor.models.base import EncodedImage, EncodedText, PrimeRow, Row, Sample
from model_executor.models.denoiser import Denoiser
from model_executor.models.vae import ImageVae, Vae
from model_executor.models.vae_region import Box, times
from model_executor.sampling import Sampling, State

PATCH = 2
"""Latent pixels per token side."""


class LatentFamily(ABC):
    """Everything but text, conditions and the denoiser itself."""

    family: ClassVar[str]
    summary: ClassVar[str]
    """What it is and how it edits, in a few words."""

    denoiser: ClassVar[type[Denoiser]]
    vae: ClassVar[type[Vae]] = ImageVae
    lora_loader: ClassVar[str]
    """What reads its adapters, a class of `diffusers.loaders.lora_pipeline`."""

    text_parts: tuple[str, ...]
    """The text encoders, named as in model_index.json."""

    text_sees_template = False

    samples_packed = True
    """Whether the pipeline's loop has latents packed: noise that a sampler draws falls into their shape."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._device = checkpoint.device
        self._vae_config, self._transformer_config = checkpoint.config("vae"), checkpoint.config("transformer")
        self._vae_scale, self._latent_channels = self.vae.scale_and_channels(self._vae_config)
        self._sampling = Sampling(checkpoint.load("scheduler"))
        self._parts: dict[str, Any] = {}  # part name -> module
        self._transformer: Denoiser | None = None
        self._loaded_vae: Vae | None = None

    # -------------------------------------------------------------------------------------------- each family's own

    @abstractmethod
    def info(self, name: str) -> ModelInfo:
        """As `Family.info`."""

    @abstractmethod
    def encode_text(self, prompt: str, max_sequence_length: int, template: Tensor | None = None) -> EncodedText:
        """As `Family.encode_text`."""

    @abstractmethod
    def encode_image(
        self, template: Tensor, mask: Tensor, *, seed: int, num_inference_steps: int, num_denoising_steps: int
    ) -> EncodedImage:
        """As `Family.encode_image`."""

    @abstractmethod
    def _timesteps(self, num_inference_steps: int, image_tokens: int) -> dict[str, Any]:
        """What the family's pipeline passes to its scheduler's `set_timesteps`."""

    @abstractmethod
    def _unmasked_condition(self, clean: Tensor) -> Tensor:
        """The condition of a template with nothing masked, whose clean latents these are."""

    # ------------------------------------------------------------------------------------------------------- parts

    @property
    def components(self) -> Mapping[str, tuple[str, ...]]:
        return {"text_encoder": self.text_parts, "vae": ("vae",), "transformer": ("transformer",)}

    def put(self, part: str, module: nn.Module) -> None:
        self._parts[part] = module
        if part == "vae":
            self._loaded_vae = self.vae(module)
        if part == "transformer":
            self._transformer = self.denoiser(module, self._sampling.num_train_timesteps, owns_module=True)

    def check_adapter(self, adapter: Adapter) -> None:
        self.denoiser(self._checkpoint.outline("transformer"), self._sampling.num_train_timesteps).adapted(adapter)

    def adapted(self, adapter: Adapter) -> Self:
        twin = copy(self)
        twin._transformer = self._denoiser.adapted(adapter)
        return twin

    def drop(self, part: str) -> None:
        del self._parts[part]
        if part == "vae":
            self._loaded_vae = None
        if part == "transformer":
            self._transformer = None

    @property
    def _denoiser(self) -> Denoiser:
        if self._transformer is None:
            raise KeyError("the transformer is not loaded")
        return self._transformer

    @property
    def _vae(self) -> Vae:
        if self._loaded_vae is None:
            raise KeyError("the VAE is not loaded")
        return self._loaded_vae

    # ------------------------------------------------------------------------------------------------------- shapes

    @property
    def _token_size(self) -> int:
        size: int = self._vae_scale * PATCH
        return size

    @property
    def _latent_width(self) -> int:
        return self._latent_channels * PATCH**2

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // self._token_size, width // self._token_size

    # ------------------------------------------------------------------------------------------------------- images

    def encode_template(self, template: Tensor) -> Tensor:
        return pack(self._vae.encode(to_image(template).to(self._device, self._vae.dtype)))

    def _latent_shape(self, image: Tensor) -> tuple[int, ...]:
        """Of an image's latents, [1, channels, height / 8, width / 8]."""
        height, width = (side // self._vae_scale for side in image.shape[2:])
        return (1, self._latent_channels, height, width)

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal numbers, drawn on the CPU in the compute dtype: the numbers depend on it."""
        noise: Tensor = randn_tensor(shape, generator=generator, device=self._device, dtype=self._checkpoint.dtype)
        return noise

    def _posterior_sample(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Scaled latents of an image in -1..1: [1, channels, height / 8, width / 8]."""
        return self._vae.encode(image.to(self._device, self._vae.dtype), generator)

    def decode(self, latents: Tensor, width: int, height: int) -> Tensor:
        return to_pixels(self._vae.decode(self._vae_latents(latents, width, height)))

    def decode_region(self, latents: Tensor, active: Tensor, width: int, height: int) -> tuple[Tensor, Box]:
        """The bounding box of the active tokens, which is all of an edit that reaches the result."""
        grid = self.grid(width, height)
        tokens = _bounding_box(active, grid[1])
        pixels = self._vae.decode_region(self._vae_latents(latents, width, height), tokens, grid)
        return to_pixels(pixels), times(tokens, self._token_size)

    def _vae_latents(self, latents: Tensor, width: int, height: int) -> Tensor:
        """Packed latents as the VAE wants them, [1, channels, height / 8, width / 8]."""
        latents = latents.to(self._vae.dtype)  # what another rank exported has widened to float32
        return unpack(latents, self.grid(width, height))

    # ------------------------------------------------------------------------------------------------------ priming

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        return self.denoiser.layout_of(self._transformer_config, dtype)

    def prime_inputs(self, clean: Tensor, content_id: str, sigma: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator("cpu").manual_seed(int(content_id[:16], 16) >> 1)
        noise = self._draw(tuple(clean.shape), generator).to(clean.device, clean.dtype)
        sigma = sigma.to(clean.device, clean.dtype)
        return (1.0 - sigma) * clean + sigma * noise, self._unmasked_condition(clean)

    def prime(self, rows: Sequence[PrimeRow], blocks: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        return self._denoiser.prime(rows, blocks)

    # ---------------------------------------------------------------------------------------------------- denoising

    def modulation(
        self, pooled_prompt_embeds: Tensor, guidance_scale: float, sigmas: Tensor, num_rows: int
    ) -> Tensor | None:
        return self._denoiser.modulation(pooled_prompt_embeds, guidance_scale, sigmas, num_rows)

    def predict(self, rows: Sequence[Row]) -> list[Tensor]:
        return self._denoiser.forward(rows)

    def combine_guidance(self, predictions: Sequence[Tensor], scale: float) -> Tensor:
        """The prompt's row comes first, then the negative prompt's, if there is one."""
        wanted, *unwanted = predictions
        return unwanted[0] + scale * (wanted - unwanted[0]) if unwanted else wanted

    def advance(self, sample: Sample, velocity: Tensor) -> tuple[Tensor, State]:
        if self.samples_packed:
            return self._sampling.step(sample.latents, velocity, sample.sigmas, sample.step, sample.state)
        latents, velocity = unpack(sample.latents, sample.grid), unpack(velocity, sample.grid)
        moved, state = self._sampling.step(latents, velocity, sample.sigmas, sample.step, sample.state)
        return pack(moved), state

    def _schedule(self, num_inference_steps: int, num_denoising_steps: int, image_tokens: int) -> Tensor:
        timesteps = self._timesteps(num_inference_steps, image_tokens)
        return self._sampling.schedule(num_inference_steps, num_denoising_steps, timesteps)


class NoisedTemplate(LatentFamily):
    """Inpainting with a denoiser that knows of no mask: after each step what lies outside the mask is replaced by the
    template at that step's noise level, as `FluxInpaintPipeline` and `StableDiffusion3InpaintPipeline` do. It sees
    nothing but latents: there is no condition.

    Draws: posterior noise of the image, initial noise, posterior noise of the masked image. Nothing is made of the last
    one, but a sampler that draws noise goes on behind it.
    """

    def encode_image(
        self, template: Tensor, mask: Tensor, *, seed: int, num_inference_steps: int, num_denoising_steps: int
    ) -> EncodedImage:
        generator = torch.Generator("cpu").manual_seed(seed)
        image = to_image(template)
        rows, columns = self.grid(image.shape[3], image.shape[2])
        sigmas = self._schedule(num_inference_steps, num_denoising_steps, rows * columns).to(self._device)
        clean = pack(self._posterior_sample(image, generator))
        noise = pack(self._draw(self._latent_shape(image), generator))
        self._draw(self._latent_shape(image), generator)
        return EncodedImage(
            latents=self._sampling.noised(clean, noise, sigmas, 0),
            condition=self._unmasked_condition(clean),
            outside=torch.cat([clean, noise, self._latent_mask(mask).to(clean)], dim=1),
            sigmas=sigmas,
            state=self._sampling.begin(generator),
        )

    def advance(self, sample: Sample, velocity: Tensor) -> tuple[Tensor, State]:
        moved, state = super().advance(sample, velocity)
        clean, noise, mask = sample.outside.chunk(3, dim=1)
        noised = self._sampling.noised(clean, noise, sample.sigmas, sample.step + 1)
        return (1 - mask) * noised + mask * moved, state

    def _latent_mask(self, mask: Tensor) -> Tensor:
        """The pipelines' `prepare_mask_latents`: one pixel for each of a latent's, packed like latents. mask: uint8
        [height, width] -> float32 [image tokens, latent width]."""
        height, width = (side // self._vae_scale for side in mask.shape)
        small = nn.functional.interpolate(mask[None, None].float(), size=(height, width))
        return pack(small.repeat(1, self._latent_channels, 1, 1))

    def _unmasked_condition(self, clean: Tensor) -> Tensor:
        return clean.new_empty(len(clean), 0)


def to_image(template: Tensor) -> Tensor:
    """uint8 [height, width, 3] -> float32 [1, 3, height, width] in -1..1; VaeImageProcessor.preprocess."""
    return (template.permute(2, 0, 1)[None].float() / 255.0) * 2.0 - 1.0


def to_pixels(image: Tensor) -> Tensor:
    """[1, 3, height, width] in -1..1 -> uint8 [height, width, 3]; VaeImageProcessor.postprocess."""
    image = (image * 0.5 + 0.5).clamp(0, 1)
    pixels: Tensor = (image[0].cpu().permute(1, 2, 0).float() * 255).round().to(torch.uint8)
    return pixels.contiguous()


def pack(x: Tensor) -> Tensor:
    """[1, channels, height, width] -> [height / 2 * width / 2, channels * 4]; FluxPipeline._pack_latents."""
    _, channels, height, width = x.shape
    x = x.view(channels, height // PATCH, PATCH, width // PATCH, PATCH).permute(1, 3, 0, 2, 4)
    return x.reshape(-1, channels * PATCH**2)


def unpack(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """[rows * columns, channels * 4] -> [1, channels, rows * 2, columns * 2]; FluxPipeline._unpack_latents."""
    rows, columns = grid
    x = x.view(rows, columns, -1, PATCH, PATCH).permute(2, 0, 3, 1, 4)
    return x.reshape(1, -1, rows * PATCH, columns * PATCH)


def refuse(checkpoint: Checkpoint, reason: str) -> ConfigError:
    """That a checkpoint cannot be served."""
    return ConfigError(f"{checkpoint.path}: {reason}")


def _bounding_box(tokens: Tensor, columns: int) -> Box:
    """Box around token indices of a grid with so many columns, in tokens."""
    x, y = tokens % columns, tokens // columns
    return int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1

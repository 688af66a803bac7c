"""VaeFamily: the code that all model families share, whose denoisers work on patches of a VAE's latents.

Latents are packed: a token's row holds its patch, channel by channel. Random numbers come from
``torch.Generator("cpu").manual_seed(seed)``, drawn in the order of the diffusers pipeline that a family follows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn

from core.errors import ConfigError, NonFiniteError
from core.interpolation import Interpolation
from core.latent_space import LatentSpace
from core.model_info import ModelInfo
from core.patches import PatchSet
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.checkpoint.quantization import pack_int8
from model_executor.cpu import cpu_gains_by_bfloat16
from model_executor.host_weights import ON_DEVICE, JointWeights, Weights
from model_executor.kernels.gpu_tables import upload
from model_executor.kernels.operators import Operators, chosen_operators
from model_executor.models.base import EncodedText, Family, ImageInputs, PreparedAdapter, SteeredModel
from model_executor.models.boxes import Box, around, times
from model_executor.models.latents import PATCH, pack, unpack
from model_executor.models.parts import Classes
from model_executor.models.vae.picture_key import PictureKey
from model_executor.models.vae.vae import ImageVae, Vae
from model_executor.patches.adapters import Adapter, LoraFormat
from model_executor.patches.module_patches import unarranged
from model_executor.patches.part_patches import AnyPatches
from model_executor.samplers.sampling import Sampling
from model_executor.samplers.timestep_sampling import TimestepSampling

KEPT_NOISES = 16
"""Templates whose noise is cached: every chunk of priming needs it, and in some families every step. One takes 0.5 MB
at 1024x1024 pixels in half precision."""


SCALING = {"scaling_factor": 0.18215, "shift_factor": None, "latents_mean": None, "latents_std": None}
"""Entries of a VAE's configuration by which its latents are scaled -> what diffusers takes where they are missing."""


class VaeFamily(Family):
    """Implements pictures, latents and sizes; subclasses add text, conditions, sampling and the denoiser."""

    family: ClassVar[str]
    checkpoints: ClassVar[str]
    """Published checkpoints of this layout, for the lists of families."""

    summary: ClassVar[str]
    """What the model is and how it edits, in a few words, for the printed list of families."""

    denoiser_part: ClassVar[str] = "transformer"
    """The denoiser's name in model_index.json."""

    lora_loader: ClassVar[str]
    """The class of `diffusers.loaders.lora_pipeline` that reads its adapters."""

    patch: int = PATCH
    """Latent pixels per token side."""

    vae: ClassVar[type[Vae]] = ImageVae
    classes: ClassVar[Classes]
    """Part of a checkpoint -> the classes it may have."""

    _sampling: Sampling | TimestepSampling

    text_parts: tuple[str, ...]
    """The text encoders' names in model_index.json."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        checkpoint.check_classes(self.classes)
        self._checkpoint = checkpoint
        self._device = checkpoint.device
        self._vae_config = checkpoint.config("vae")
        self._vae_scale, self._latent_channels = self.vae.scale_and_channels(self._vae_config)
        self._parts: dict[str, Any] = {}  # part name -> what `prepare` made of it
        self._patch_ids = set[str]()  # of adapters in use
        self._noise_of = lru_cache(maxsize=KEPT_NOISES)(self._draw_noise_of)

    def _info(self, name: str, *, num_inference_steps: int, **own: Any) -> ModelInfo:
        """`info`. num_inference_steps: where the checkpoint names no default. own: what families do not say alike."""
        return ModelInfo(
            name=name,
            family=self.family,
            token_size=self._token_size,
            latent_width=self._latent_width,
            default_num_inference_steps=self._checkpoint.defaults.num_inference_steps or num_inference_steps,
            solver_order=self._sampling.order,
            remembers_steps=self._sampling.remembers_steps,
            min_inference_steps=self._sampling.min_steps,
            has_shift=self._sampling.has_shift,
            takes_sigmas=self._sampling.takes_sigmas,
            device=self._device.type,
            dtype=str(self._checkpoint.dtype).removeprefix("torch."),
            **own,
        )

    def _guidance(self, usual: float) -> float:
        """The default guidance scale: the checkpoint's own, or the usual one."""
        own = self._checkpoint.defaults.guidance_scale
        return usual if own is None else own

    # ------------------------------------------------------------------------------------------------------- parts

    @property
    def components(self) -> Mapping[str, tuple[str, ...]]:
        return {"text_encoder": self.text_parts, "vae": ("vae",), "transformer": (self.denoiser_part,)}

    @property
    def latent_space(self) -> LatentSpace:
        scaling = {name: self._vae_config.get(name, usual) for name, usual in SCALING.items()}
        return LatentSpace(
            token_size=self._token_size,
            latent_width=self._latent_width,
            scaling={name: value for name, value in scaling.items() if value},
            noise=self._sampling.scale,
            sampler=self._sampling.name,
        )

    def recipe(self, part: str) -> str:
        if part == self.denoiser_part:
            chosen = self._checkpoint
            wishes = (chosen.kernels, "batch-invariant" if chosen.batch_invariant else "", chosen.cuda_graphs)
            return " ".join(filter(None, (self._denoiser_recipe, *wishes)))
        return self.vae.__name__ if part == "vae" else ""

    @property
    @abstractmethod
    def _denoiser_recipe(self) -> str:
        """All that `_make_denoiser` depends on, besides module and kernels."""

    @property
    def text_recipe(self) -> str:
        return type(self)._encode_text.__qualname__

    def prepare(self, part: str, module: nn.Module) -> Any:
        if part == self.denoiser_part:
            kernels, batch_invariant = self._checkpoint.kernels, self._checkpoint.batch_invariant
            operators = chosen_operators(kernels, self._device, batch_invariant=batch_invariant)
            if operators.kernels is not None:
                pack_int8(module, operators.kernels)
            denoiser = self._make_denoiser(module, operators)
            denoiser.graphs.enabled = self._checkpoint.cuda_graphs == "auto"
            return denoiser
        return self.vae(module, device=self._device) if part == "vae" else unarranged(module, self._device)

    @abstractmethod
    def _make_denoiser(self, module: nn.Module, operators: Operators) -> Any:
        """The loaded denoiser in the form that it is computed with."""

    def put(self, part: str, prepared: Any) -> None:
        self._parts[part] = prepared

    def _steered(self, denoiser: Mapping[str, Any], **own: Any) -> SteeredModel:
        """`steered`, of a family that ControlNets steer. denoiser: its configuration. own: further fields."""
        return SteeredModel(
            family=self.family,
            config=denoiser,
            num_train_timesteps=self._sampling.num_train_timesteps,
            token_size=self._token_size,
            vae_scale=self._vae_scale,
            latent_channels=self._latent_channels,
            **own,
        )

    def use_graphs(self, is_wanted: bool) -> None:
        if (denoiser := self._parts.get(self.denoiser_part)) is not None:
            denoiser.graphs.enabled = is_wanted and self._checkpoint.cuda_graphs == "auto"

    def drop_graphs(self) -> None:
        if (denoiser := self._parts.get(self.denoiser_part)) is not None:  # the loader's thread may drop it
            denoiser.graphs.clear()

    @property
    def lora_format(self) -> LoraFormat:
        sampling = self._sampling
        return LoraFormat(self.lora_loader, sampling.has_shift, sampling.takes_sigmas, sampling.min_steps)

    def drop(self, part: str) -> None:
        del self._parts[part]

    def weights(self, component: str) -> Weights:
        parts = [part for part in self.components.get(component, ()) if part != self.denoiser_part]
        return (
            JointWeights([self._parts[part].weights for part in parts if part in self._parts]) if parts else ON_DEVICE
        )

    def _part(self, name: str) -> Any:
        if name not in self._parts:
            raise KeyError(f"the {name} is not loaded")
        return self._parts[name]

    # ---------------------------------------------------------------------------------------------------- adapters

    def _patches_of(self, part: str) -> AnyPatches:
        """The adapters of a denoiser or text encoder. Raises KeyError if it is not loaded."""
        loaded = self._part(part)
        patches: AnyPatches = loaded.patches if part == self.denoiser_part else loaded
        return patches

    @abstractmethod
    def _outline_patches_of(self, part: str) -> AnyPatches:
        """The same, none, of the part without weights."""

    def _encoder(self, part: str, patches: PatchSet = ()) -> Any:
        """A text encoder, to be used before the next call."""
        return self._part(part).under(patches)

    def encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        with self.weights("text_encoder").on_device():
            return self._encode_text(prompt, max_sequence_length, pictures, patches)

    @abstractmethod
    def _encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        """`encode_text`, with the text encoders' weights on the device."""

    def patches_of_text(self, patches: PatchSet) -> PatchSet:
        changed = {patch for part in self.text_parts for patch in self._part(part).changed_by(patches)}
        return tuple(patch for patch in patches if patch in changed)

    def check_adapter(self, adapter: Adapter) -> None:
        for part, layers in adapter.parts.items():
            self._outline_patches_of(part).prepare(adapter, layers)

    def prepare_adapter(self, adapter: Adapter, parts: Collection[str]) -> PreparedAdapter:
        changed = {part: layers for part, layers in adapter.parts.items() if part in parts}
        return {part: self._patches_of(part).prepare(adapter, layers) for part, layers in changed.items()}

    def put_adapter(self, patch: str, prepared: PreparedAdapter) -> None:
        for part, its in prepared.items():
            self._patches_of(part).put(patch, its)
        self._patch_ids.add(patch)

    def drop_adapter(self, patch: str, parts: Collection[str]) -> None:
        self._patch_ids.discard(patch)
        for part in {self.denoiser_part, *self.text_parts}.intersection(parts):
            self._patches_of(part).drop(patch)

    def lacking(self, patches: PatchSet) -> PatchSet:
        return tuple(patch for patch in patches if patch.id not in self._patch_ids)

    @property
    def _vae(self) -> Vae:
        vae: Vae = self._part("vae")
        return vae

    @property
    def _mask_aware_vae(self) -> Vae:
        """What mask-aware edits encode and decode with. On CPUs that gain by it, it computes in bfloat16 also for a
        model in float32, unless PyTorch's operators are asked for: with the embedded one in 0.4 of the time with AMX;
        its pixels differ by 0.16 of 255 on average and by 3 at most."""
        vae, kernels = self._vae, self._checkpoint.kernels
        is_float = vae.dtype in (torch.float32, torch.bfloat16)
        if self._device.type != "cpu" or kernels == "torch" or not is_float or not cpu_gains_by_bfloat16():
            return vae
        return vae.in_bfloat16(chosen_operators(kernels, self._device).kernels)

    # ------------------------------------------------------------------------------------------------------- shapes

    @property
    def _token_size(self) -> int:
        size: int = self._vae_scale * self.patch
        return size

    @property
    def _latent_width(self) -> int:
        return self._latent_channels * self.patch**2

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // self._token_size, width // self._token_size

    # ------------------------------------------------------------------------------------------------------- images

    def encode_template(self, template: Tensor, *, cache_salt: str | None = None) -> Tensor:
        vae = self._mask_aware_vae
        image = to_image(self._here(template)).to(vae.dtype)
        return pack(vae.encode(image, key=PictureKey.of(template, cache_salt)), self.patch)

    def _here(self, pixels: Tensor) -> Tensor:
        """A template or mask of uint8 on the family's device. It is uploaded as it is, and all that is computed from it
        is computed there: this takes a fourth of the bytes, and little of this thread's time."""
        return upload(pixels, self._device) if pixels.device.type == "cpu" else pixels.to(self._device)

    def upscale(
        self, latents: Tensor, grid: tuple[int, int], to_grid: tuple[int, int], method: Interpolation = "bilinear"
    ) -> Tensor:
        size = [side * self.patch for side in to_grid]
        pixels = unpack(latents, grid, self.patch).float()
        enlarged = nn.functional.interpolate(pixels, size=size, mode=method)
        return pack(enlarged, self.patch).to(latents.dtype)

    def _unpacked_like(self, like: Tensor, packed: Tensor) -> Tensor:
        """Packed latents in the shape [1, channels, height / 8, width / 8], device and dtype of `like`."""
        rows, columns = (side // self.patch for side in like.shape[2:])
        return unpack(packed, (rows, columns), self.patch).to(like)

    def _latent_shape(self, image: Tensor) -> tuple[int, ...]:
        """Shape of an image's latents, [1, channels, height / 8, width / 8]."""
        height, width = (side // self._vae_scale for side in image.shape[2:])
        return (1, self._latent_channels, height, width)

    @property
    def latents_dtype(self) -> torch.dtype:
        return self._checkpoint.dtype

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers, drawn on the CPU. dtype: on which their values depend; None: the compute dtype."""
        noise: Tensor = randn_tensor(
            shape, generator=generator, device=self._device, dtype=dtype or self._checkpoint.dtype
        )
        return noise

    def _draw_noise(
        self,
        inputs: ImageInputs,
        shape: tuple[int, ...],
        generator: torch.Generator,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A picture's initial noise. shape: of its latents. dtype: see `_draw`."""
        drawn = self._draw((inputs.number, *shape[1:]), generator, dtype)
        return drawn[inputs.index : inputs.index + 1]

    def _of_steps(self, inputs: ImageInputs, generator: torch.Generator) -> torch.Generator:
        """Draws the noise of the steps. generator: has drawn that of the start. All pictures whose noise one seed draws
        in turn have it in the same state, so those after the first have their own, as if by the seeds that follow.
        """
        return torch.Generator("cpu").manual_seed(inputs.seed + inputs.index) if inputs.index else generator

    def _of_template(self, inputs: ImageInputs, generator: torch.Generator) -> torch.Generator:
        """Draws what the VAE samples of the template. generator: draws the noise, afterwards."""
        return torch.Generator("cpu").manual_seed(inputs.seed) if inputs.noise_first else generator

    def _posterior_sample(
        self, image: Tensor, generator: torch.Generator | None, is_exact: bool, key: PictureKey | None = None
    ) -> Tensor:
        """Scaled latents of an image in -1..1: [1, channels, height / 8, width / 8]. generator, key: as for
        `Vae.encode`."""
        vae = self._vae if is_exact else self._mask_aware_vae
        return vae.encode(image.to(vae.dtype), generator, key)

    def _template_sample(self, inputs: ImageInputs, image: Tensor, generator: torch.Generator | None) -> Tensor:
        """`_posterior_sample` of the template, whose distribution is kept. image: made of it by `to_image`."""
        key = PictureKey.of(inputs.template, inputs.cache_salt)
        return self._posterior_sample(image, generator, inputs.is_exact, key)

    def _masked_sample(self, inputs: ImageInputs, image: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        """`_posterior_sample` of the template without what is under the mask, whose distribution is kept. image: as for
        `_template_sample`; mask: 1 or 0, of the image's height and width, on its device."""
        key = PictureKey.of(inputs.template, inputs.cache_salt, inputs.mask)
        return self._posterior_sample(image * (1 - mask.float()), generator, inputs.is_exact, key)

    def _latent_mask(self, mask: Tensor) -> Tensor:
        """The mask at the latents' resolution, as in the pipelines' `prepare_mask_latents`. mask: uint8 [height,
        width] -> float32 [1, 1, height / 8, width / 8]."""
        height, width = (side // self._vae_scale for side in mask.shape)
        return nn.functional.interpolate(mask[None, None].float(), size=(height, width))

    def decode(self, latents: Tensor, width: int, height: int) -> Tensor:
        return to_pixels(self._vae.decode(self._vae_latents(latents, width, height)))

    def decode_region(self, latents: Tensor, active: Tensor, width: int, height: int) -> tuple[Tensor, Box]:
        """Decodes the bounding box of the active tokens: nothing outside it reaches the result."""
        grid, smaller = self.grid(width, height), self.patch // PATCH  # the VAE's parts are counted in these
        tokens = around(active, grid[1])
        finer = (grid[0] * smaller, grid[1] * smaller)
        whole = self._vae_latents(latents, width, height)
        pixels = self._mask_aware_vae.decode_region(whole, times(tokens, smaller), finer)
        return to_pixels(pixels), times(tokens, self._token_size)

    def _vae_latents(self, latents: Tensor, width: int, height: int) -> Tensor:
        """Packed latents in the VAE's shape, [1, channels, height / 8, width / 8]."""
        latents = latents.to(self._vae.dtype)  # float32 if another rank has exported them
        return unpack(latents, self.grid(width, height), self.patch)

    # ---------------------------------------------------------------------------------------------------- denoising

    def content_noise(self, clean: Tensor, noise_id: str) -> Tensor:
        return self._noise_of(noise_id, tuple(clean.shape)).to(clean.device, clean.dtype)

    def _draw_noise_of(self, noise_id: str, shape: tuple[int, ...]) -> Tensor:
        return self._draw(shape, torch.Generator("cpu").manual_seed(int(noise_id[:16], 16) >> 1))

    def combine_guidance(self, predictions: Sequence[Tensor], scale: float) -> Tensor:
        """predictions: the prompt's, then the negative prompt's, if there is one."""
        wanted, *unwanted = predictions
        return unwanted[0] + scale * (wanted - unwanted[0]) if unwanted else wanted


def to_image(template: Tensor) -> Tensor:
    """uint8 [height, width, 3] -> float32 [1, 3, height, width] in -1..1, as VaeImageProcessor.preprocess on a CPU."""
    # By a number, PyTorch would divide as a multiplication with its reciprocal on a GPU, which rounds differently.
    levels = torch.full((), 255.0, dtype=torch.float32, device=template.device)
    return (template.permute(2, 0, 1)[None].float() / levels) * 2.0 - 1.0


def to_pixels(image: Tensor) -> Tensor:
    """[1, 3, height, width] in -1..1 -> uint8 [height, width, 3] in host memory, as VaeImageProcessor.postprocess. What
    a GPU holds is rounded there, so that 3 bytes per pixel are copied. Raises NonFiniteError for what is no picture: a
    VAE makes such of latents that are not finite, or too large."""
    # A sum is not finite if any number is not, and takes one pass. It arrives before the picture, which is waited for.
    total = image.sum(dtype=torch.float32).to("cpu", non_blocking=True)
    levels = (image * 0.5 + 0.5).clamp(0, 1)
    pixels: Tensor = (levels[0].permute(1, 2, 0).float() * 255).round().to(torch.uint8).contiguous().cpu()
    if not total.isfinite() and not image.isfinite().all():  # large finite numbers may have such a sum, too
        raise NonFiniteError("the picture's numbers are not finite")
    return pixels


def refuse(checkpoint: ModelCheckpoint, reason: str) -> ConfigError:
    """The error that this checkpoint cannot be served."""
    return ConfigError(f"{checkpoint.path}: {reason}")

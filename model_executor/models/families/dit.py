"""The class-conditional DiT family, which follows `diffusers.DiTPipeline`: pictures of a class instead of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from core.errors import InvalidRequestError
from core.model_info import ModelInfo
from core.patches import PatchSet
from model_executor.checkpoint.loader import ModelCheckpoint
from model_executor.models.base import EncodedImage, EncodedText, ImageInputs, SamplingState
from model_executor.models.families.timestep_family import TimestepFamily
from model_executor.models.families.transformer_family import TransformerFamily
from model_executor.models.families.vae_family import refuse
from model_executor.models.latents import pack
from model_executor.models.parts import Classes
from model_executor.models.transformer.dit_transformer import DiTTransformer
from model_executor.patches.adapters import LoraFormat
from model_executor.samplers.sampling import State
from model_executor.samplers.timestep_sampling import TimestepSampling

REQUIRED = {
    "norm_type": "ada_norm_zero",
    "activation_fn": "gelu-approximate",
    "norm_elementwise_affine": False,
    "upcast_attention": False,
}
"""Options of the denoiser's configuration that have these values, also diffusers' defaults, in all DiTs."""


class DiT(TransformerFamily, TimestepFamily):
    """Checkpoints whose model_index.json names DiTPipeline. Guidance is classifier-free: the other row's class is the
    one after the last, which training replaced classes by (the pipeline has 1000 there, the number of ImageNet's).
    Makes pictures of one size, and edits none.
    """

    family = "dit"
    checkpoints = "DiT-XL/2 and other sizes"
    summary = "DiT: makes pictures of a class, from noise; classifier-free guidance"
    denoiser = DiTTransformer
    text_parts = ()
    classes: ClassVar[Classes] = {
        # Of others, the pipeline would not scale the initial noise.
        "scheduler": ("DDIMScheduler", "DPMSolverMultistepScheduler"),
        "transformer": ("DiTTransformer2DModel", "Transformer2DModel"),
        "vae": ("AutoencoderKL",),
    }
    _sampling: TimestepSampling

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        self._check()
        config = self._transformer_config
        self.patch = int(config["patch_size"])
        self._num_classes = int(config["num_embeds_ada_norm"])

    def _check(self) -> None:
        """Raises ConfigError for a denoiser or a VAE that is not supported."""
        config, channels = self._transformer_config, self._latent_channels
        if others := [name for name, value in REQUIRED.items() if config.get(name, value) != value]:
            named = ", ".join(f"{name} {config[name]}" for name in others)
            raise refuse(self._checkpoint, f"a denoiser with {named} is not supported")
        sizes = config["in_channels"], config.get("out_channels") or config["in_channels"]
        if sizes not in ((channels, channels), (channels, 2 * channels)):
            wanted = f"{channels} input and as many or twice as many output channels"
            raise refuse(self._checkpoint, f"a denoiser of other than {wanted} is not supported")
        if self._vae_config.get("latents_mean") is not None:
            raise refuse(self._checkpoint, "a VAE with latents_mean is not supported")

    @property
    def lora_format(self) -> LoraFormat:
        """Raises ConfigError: diffusers reads no adapters of this family."""
        raise refuse(self._checkpoint, f"models of the family {self.family} take no adapters")

    def info(self, name: str) -> ModelInfo:
        return self._info(
            name,
            native_size=self._transformer_config["sample_size"] * self._vae_scale,
            num_inference_steps=50,
            default_guidance_scale=self._guidance(4.0),
            num_classes=self._num_classes,
            class_names=class_names(self._checkpoint.index.get("id2label") or {}),
            max_text_tokens=0,
            has_guidance=True,
            has_true_cfg=False,
            is_guidance_cfg=True,
            extra_steps=self._sampling.extra_steps,
        )

    # -------------------------------------------------------------------------------------------------- conditions

    def encode_class(self, label: int | None) -> EncodedText:
        embeds = self._denoiser.embed_class(self._num_classes if label is None else label)
        return EncodedText(
            prompt_embeds=embeds.new_empty(0, 0), pooled_prompt_embeds=embeds, num_tokens=0, truncated=False
        )

    @property
    def _denoiser(self) -> DiTTransformer:
        denoiser: DiTTransformer = self._part("transformer")
        return denoiser

    def encode_nothing(self, text_tokens: int, template: Tensor, patches: PatchSet = ()) -> EncodedText:
        return self.encode_class(None)

    def encode_longest(self, text_tokens: int, pictures: Sequence[Tensor]) -> EncodedText:
        return self.encode_class(None)

    def _encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        """Raises InvalidRequestError: there are no prompts."""
        raise InvalidRequestError("This model makes pictures of a class, not of a prompt.", param="class_label")

    def encode_image(self, inputs: ImageInputs) -> EncodedImage:
        """Noise of the template's size; nothing else of template and mask counts."""
        generator = torch.Generator("cpu").manual_seed(inputs.seed)
        run = self._sampling.run(inputs.num_inference_steps, inputs.num_denoising_steps)
        height, width = (side // self._vae_scale for side in inputs.mask.shape)
        noise = self._draw_noise(inputs, (1, self._latent_channels, height, width), generator)
        latents = pack(self._sampling.pure_noise(noise, run), self.patch)
        return EncodedImage(
            latents=latents,
            condition=latents[:, :0],
            outside=latents[:, :0],
            sigmas=self._sampling.noise_levels(run).to(self._device),
            state=self._sampling.begin(run, self._of_steps(inputs, generator)),
        )

    # ---------------------------------------------------------------------------------------------------- denoising

    def prime_inputs(
        self, clean: Tensor, noise: Tensor, sigma: Tensor, references: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Raises InvalidRequestError: there are no edits that would read pages."""
        raise InvalidRequestError("This model makes pictures of a class, and edits none.", param="model")

    def advance(self, sample: SamplingState, prediction: Tensor) -> tuple[Tensor, State]:
        moved, state = self._moved(sample, prediction)
        return pack(moved, self.patch), state


def class_names(id2label: Any) -> dict[str, int]:
    """Name -> its class, as DiTPipeline reads them from model_index.json: a class may have several, between commas."""
    return {name.strip(): int(label) for label, names in id2label.items() for name in names.split(",")}

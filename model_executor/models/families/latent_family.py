"""LatentFamily: the code that FLUX, Stable Diffusion 3, Qwen-Image and Z-Image share: a transformer, sampled by flow
matching.

`NoisedTemplate` adds inpainting for denoisers that see no mask.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from model_executor.checkpoint.loader import ModelCheckpoint, first_line
from model_executor.models.base import EncodedImage, ImageInputs, SamplingState
from model_executor.models.chat import Chat
from model_executor.models.families.transformer_family import TransformerFamily
from model_executor.models.families.vae_family import refuse, to_image
from model_executor.models.latents import pack, unpack
from model_executor.samplers.sampling import Sampling, State, predict_clean


class LatentFamily(TransformerFamily):
    """Implements sampling; subclasses add text, conditions and the denoiser."""

    _sampling: Sampling

    references_replace_template: ClassVar[bool] = False
    """Whether the denoiser sees references in place of the template: what `ReferencePictures` says to the engine."""

    chooses_sigmas: ClassVar[bool] = True
    """Whether the diffusers pipeline gives its scheduler noise levels of its own."""

    samples_packed = True
    """Whether the diffusers pipeline samples packed latents: a sampler that draws noise draws it in that shape."""

    samples_controls: ClassVar[bool] = False
    """Whether latents of control pictures are sampled from the VAE's posterior, before all else is drawn."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        super().__init__(checkpoint)
        try:
            self._sampling = Sampling(checkpoint.load("scheduler"))
        except ValueError as error:
            raise refuse(checkpoint, str(error)) from error
        if self.chooses_sigmas and not self._sampling.takes_sigmas:
            reason = f"{self.family} chooses its noise levels itself, which {self._sampling.name} does not take"
            raise refuse(checkpoint, reason)

    def _chat_of(self, tokenizer: Any, *, thinks: bool) -> Chat:
        """How a tokenizer frames prompts. thinks: as for `Chat`. Raises ConfigError."""
        try:
            return Chat(tokenizer, thinks=thinks)
        except ValueError as error:
            raise refuse(self._checkpoint, first_line(error)) from error

    # -------------------------------------------------------------------------------------------- each family's own

    @abstractmethod
    def _timesteps(self, num_inference_steps: int, image_tokens: int) -> dict[str, Any]:
        """The arguments that the family's diffusers pipeline passes to its scheduler's `set_timesteps`."""

    @abstractmethod
    def _unmasked_condition(self, clean: Tensor) -> Tensor:
        """The condition of a template with nothing masked. clean: its clean latents, [image tokens, latent width]."""

    # ------------------------------------------------------------------------------------------------------ encoding

    def _draw_controls(self, inputs: ImageInputs, image: Tensor, generator: torch.Generator) -> None:
        """Draw what `encode_controls` has drawn with this seed. image: as `to_image` makes it."""
        for _ in range(inputs.num_controls if self.samples_controls else 0):
            self._draw(self._latent_shape(image), generator)

    # ------------------------------------------------------------------------------------------------------ priming

    def prime_inputs(
        self, clean: Tensor, noise: Tensor, sigma: Tensor, references: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        sigma = sigma.to(clean.device, clean.dtype)
        condition = self._beside(self._unmasked_condition(clean), references)
        return (1.0 - sigma) * clean + sigma * noise, condition

    def _beside(self, condition: Tensor, references: Tensor | None) -> Tensor:
        """The condition of a picture with references. condition: without. references: as in `prime_inputs`."""
        if references is None or not len(references):
            return condition
        return references if self.references_replace_template else torch.cat([condition, references])

    # ---------------------------------------------------------------------------------------------------- denoising

    def denoiser_input(self, sample: SamplingState) -> Tensor:
        return sample.latents.to(self._checkpoint.dtype)

    def predict_clean(self, sample: SamplingState, prediction: Tensor) -> Tensor:
        return predict_clean(sample.latents, prediction, sample.sigmas[sample.step])

    def advance(self, sample: SamplingState, prediction: Tensor) -> tuple[Tensor, State]:
        if self.samples_packed:
            return self._sampling.step(sample.latents, prediction, sample.sigmas, sample.step, sample.state)
        latents, velocity = unpack(sample.latents, sample.grid), unpack(prediction, sample.grid)
        moved, state = self._sampling.step(latents, velocity, sample.sigmas, sample.step, sample.state)
        return pack(moved), state

    def _schedule(self, inputs: ImageInputs, image_tokens: int) -> Tensor:
        steps = inputs.num_inference_steps
        own = {} if inputs.sigmas is None else {"sigmas": [*inputs.sigmas]}
        timesteps = self._timesteps(steps, image_tokens) | own
        return self._sampling.schedule(steps, inputs.num_denoising_steps, timesteps, inputs.part, inputs.shift)


class NoisedTemplate(LatentFamily):
    """Inpainting with a denoiser that sees latents alone, no mask: after each step, everything outside the mask is
    replaced by the template at that step's noise level, as `FluxInpaintPipeline` and `StableDiffusion3InpaintPipeline`
    do.

    Random draws: posterior noise of the image, unless its mode is taken; initial noise; posterior noise of the masked
    image. The last is unused, but must be drawn: a sampler that draws noise of its own continues after it.
    """

    samples_template: ClassVar[bool] = True
    """Whether the template's latents are sampled from the VAE's posterior; else they are its mode."""

    empty_has_conditions: ClassVar[bool] = True
    """Whether a denoiser that sees the template as tokens of its own has them also where there is none."""

    @property
    def _conditions_info(self) -> dict[str, Any]:
        """The fields of `ModelInfo` about the template as tokens of its own."""
        conditions = self.denoiser.rows_per_token - 1
        return {"conditions_per_token": conditions, "empty_has_conditions": self.empty_has_conditions}

    def encode_image(self, inputs: ImageInputs) -> EncodedImage:
        generator = torch.Generator("cpu").manual_seed(inputs.seed)
        image, mask = to_image(self._here(inputs.template)), self._here(inputs.mask)
        self._draw_controls(inputs, image, generator)
        rows, columns = self.grid(image.shape[3], image.shape[2])
        sigmas = self._schedule(inputs, rows * columns).to(self._device)
        clean, noise = self._clean_and_noise(inputs, image, generator)
        start = clean if inputs.start is None else inputs.start.to(clean)
        latents = start if inputs.goes_on else self._sampling.noised(start, noise, sigmas, 0)
        return EncodedImage(
            latents=latents.to(self.latents_dtype),
            condition=self._beside(self._condition(inputs, clean), self._encoded_references(inputs)),
            outside=torch.cat([clean, noise, self._packed_mask(mask).to(clean)], dim=1),
            sigmas=sigmas,
            state=self._sampling.begin(self._of_steps(inputs, generator)),
        )

    def _clean_and_noise(self, inputs: ImageInputs, image: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Clean latents of the template, and the initial noise, [image tokens, latent width] each. image: the template,
        of which `to_image` has made it."""
        of_template = self._of_template(inputs, generator) if self.samples_template else None
        clean = pack(self._template_sample(inputs, image, of_template))
        noise = pack(self._draw_noise(inputs, self._latent_shape(image), generator))
        if self._draws_masked_image(inputs):
            self._draw(self._latent_shape(image), generator)
        return clean, noise

    def _encoded_references(self, inputs: ImageInputs) -> Tensor | None:
        """Clean latents of the references, one after the other, zeros if no step computes them; None: there are
        none."""
        if inputs.paged_reference_tokens:
            size = inputs.paged_reference_tokens, self._latent_width
            return torch.zeros(size, dtype=self._checkpoint.dtype, device=self._device)
        pictures = [to_image(self._here(picture)) for picture in inputs.references]
        encoded = [pack(self._posterior_sample(picture, None, inputs.is_exact)) for picture in pictures]
        return torch.cat(encoded) if encoded else None

    def _draws_masked_image(self, inputs: ImageInputs) -> bool:
        """Whether the pipeline draws posterior noise of the masked image."""
        return True

    def _condition(self, inputs: ImageInputs, clean: Tensor) -> Tensor:
        """`EncodedImage.condition`. clean: the template's clean latents, [image tokens, latent width]."""
        condition = self._unmasked_condition(clean)
        return condition[:0] if inputs.is_empty and not self.empty_has_conditions else condition

    def advance(self, sample: SamplingState, prediction: Tensor) -> tuple[Tensor, State]:
        moved, state = super().advance(sample, prediction)
        width = moved.shape[1]
        clean, noise, mask = sample.outside.tensor_split((width, 2 * width), dim=1)
        noised = self._sampling.noised(clean, noise, sample.sigmas, sample.step + 1)
        return (1 - mask) * noised + mask * moved, state

    def _packed_mask(self, mask: Tensor) -> Tensor:
        """The mask, the same for every channel: float32 [image tokens, latent width], or one number per token."""
        return pack(self._latent_mask(mask).repeat(1, self._latent_channels, 1, 1))

    def _unmasked_condition(self, clean: Tensor) -> Tensor:
        """The template itself, where the denoiser sees it as tokens of its own; else nothing."""
        return clean if self.denoiser.rows_per_token > 1 else clean.new_empty(len(clean), 0)

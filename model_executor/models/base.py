"""What a model family is to the runner: stages as functions on tensors, free of requests and scheduling.

A family turns prompts, pictures and latents into one another. It holds no per-request state: whatever lives from one
step to the next is a named tensor that the runner keeps in its tensor store. A step of the loop is `predict`, with a
row for each of a request's prompts, then `combine_guidance`, then `advance`. What a denoiser predicts is a velocity; a
UNet, trained at timesteps, may predict the noise instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor, nn

from core.model_info import ModelInfo
from core.page_scheme import PageDtype, PageLayout
from model_executor.models.boxes import Box
from model_executor.page_cache.pages import Pages
from model_executor.patches.adapters import Adapter, LoraFormat
from model_executor.samplers.sampling import State


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """prompt_embeds: [text tokens, width]; of some families as many as the prompt has. pooled_prompt_embeds: [pooled
    width]. num_tokens: tokens of the prompt that were used, padding not counted. truncated: the prompt was longer than
    the encoder's length."""

    prompt_embeds: Tensor
    pooled_prompt_embeds: Tensor
    num_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """latents: [image tokens, latent width], where sampling starts. condition: [image tokens, condition width], what
    the denoiser sees of template and mask. outside: [image tokens, outside width], what `Family.advance` keeps the
    template with outside the mask. Either width is 0 in a family that works without. sigmas: float32 [steps + 1], the
    noise levels still ahead, ending at 0. state: the sampler's."""

    latents: Tensor
    condition: Tensor
    outside: Tensor
    sigmas: Tensor
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Where one request's sampling stands before `step`. latents, outside, sigmas, state: as in `EncodedImage`. grid:
    image tokens as (rows, columns)."""

    latents: Tensor
    outside: Tensor
    sigmas: Tensor
    step: int
    state: State
    grid: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request's part of a forward pass.

    latents, condition: all image tokens of the request, latents as `Family.denoiser_input` has them; rows of tokens
    that are computed in no block are not read. A denoiser that sees the template as tokens of their own has these from
    `condition`.
    sigma: float32 scalar, the noise level. grid: image tokens as (rows, columns). active: int64 [active tokens], the
    token indices to compute, ascending; None for all. box: around them, in tokens; where it is None, who needs it finds
    it, and waits for a GPU. pages: the template's at this noise level; needed with `active`. full_blocks: those that
    compute all tokens all the same: pages, the leading ones where these hold keys and values. modulation: [1, width],
    of `Family.modulation` at this noise level, None to have it computed.
    """

    latents: Tensor
    condition: Tensor
    prompt_embeds: Tensor
    pooled_prompt_embeds: Tensor
    sigma: Tensor
    guidance_scale: float
    grid: tuple[int, int]
    active: Tensor | None = None
    box: Box | None = None
    pages: Pages | None = None
    full_blocks: Collection[int] = ()
    modulation: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimeRow:
    """One chunk of one keyframe's pass: all image tokens of a template through some blocks.

    latents, condition: what `Family.prime_inputs` made. hidden: what the previous chunk of this pass returned, None for
    the first one. entry: uint8 [entry bytes], the pages to write, laid out as `core.page_scheme` says.
    """

    latents: Tensor
    condition: Tensor
    prompt_embeds: Tensor
    pooled_prompt_embeds: Tensor
    sigma: Tensor
    guidance_scale: float
    grid: tuple[int, int]
    hidden: tuple[Tensor, ...] | None
    entry: Tensor


class Family(Protocol):
    """One model architecture, made with the light parts of a checkpoint; parts with weights come and go by name."""

    @property
    def lora_format(self) -> LoraFormat:
        """How its adapters are read."""

    @property
    def components(self) -> Mapping[str, tuple[str, ...]]:
        """Component of a ModelKey -> parts of the checkpoint it consists of, named as in model_index.json."""

    def put(self, part: str, module: nn.Module) -> None:
        """Take a loaded part in use."""

    def check_adapter(self, adapter: Adapter) -> None:
        """Raises ConfigError where it does not fit; no weights are needed for that."""

    def adapted(self, adapter: Adapter) -> Self:
        """This model, loaded as it is, with an adapter; they share all weights. Raises ConfigError where it does not
        fit."""

    def drop(self, part: str) -> None:
        """Forget a part; its memory is free once nothing else holds it."""

    def info(self, name: str) -> ModelInfo:
        """What this model can do, read from its configuration alone."""

    @property
    def text_sees_template(self) -> bool:
        """Whether a prompt's embedding depends on the picture it is for."""

    @property
    def sees_all_latents(self) -> bool:
        """Whether the denoiser reads the latents of tokens that no block computes: the template's then."""

    def encode_text(self, prompt: str, max_sequence_length: int, template: Tensor | None = None) -> EncodedText:
        """Embed a prompt, padded or cut to `max_sequence_length` tokens. template: uint8 [height, width, 3], the
        picture that it is for; needed where `text_sees_template`."""

    def encode_image(
        self,
        template: Tensor,
        mask: Tensor,
        *,
        seed: int,
        num_inference_steps: int,
        num_denoising_steps: int,
    ) -> EncodedImage:
        """Where sampling starts, and what it is conditioned on. template: uint8 [height, width, 3]; mask: uint8
        [height, width], 1 = edit; sides are multiples of the token size."""

    def encode_template(self, template: Tensor) -> Tensor:
        """Clean latents of a template, uint8 [height, width, 3]: the posterior's mode, [image tokens, latent width]."""

    def page_layout(self, dtype: PageDtype) -> PageLayout:
        """The shape of this model's pages."""

    def prime_inputs(self, clean: Tensor, noise_id: str, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """(latents, condition) of a template at noise level `sigma`: (1 - sigma) * clean + sigma * noise, and the
        condition of an image with nothing masked. clean: [image tokens, latent width]. noise_id: the noise is seeded by
        its first 16 hex digits, which are the content id's, and may be kept under all of it."""

    def prime(self, rows: Sequence[PrimeRow], blocks: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        """Run all tokens of each row through the blocks [start, stop), write these blocks' pages, and return each row's
        hidden state (empty after the last block, which computes keys and values only)."""

    def modulation(
        self, pooled_prompt_embeds: Tensor, guidance_scale: float, sigmas: Tensor, num_rows: int
    ) -> Tensor | None:
        """What the steps of a run compute from its noise levels and pooled prompt alone, for all levels at once,
        [levels, width]: one pass over those weights instead of one a step. None where so much is too much to keep for
        each of the request's rows."""

    def denoiser_input(self, sample: Sample) -> Tensor:
        """The sample's latents as the denoiser takes them: a sampler may keep them at another scale."""

    def predict(self, rows: Sequence[Row]) -> list[Tensor]:
        """Prediction for each row's active tokens, [active tokens, latent width]: one forward pass for all rows."""

    def combine_guidance(self, predictions: Sequence[Tensor], scale: float) -> Tensor:
        """One prediction from those of all of a request's rows: of its prompt and, with classifier-free guidance of
        this scale, of its negative prompt."""

    def predict_clean(self, sample: Sample, prediction: Tensor) -> Tensor:
        """The clean latents that a prediction points at, [image tokens, latent width]. prediction: as for `advance`."""

    def advance(self, sample: Sample, prediction: Tensor) -> tuple[Tensor, State]:
        """Latents and sampler state after a step. prediction: all tokens', [image tokens, latent width]; where tokens
        were not computed, neither are their latents to be read."""

    def decode(self, latents: Tensor, width: int, height: int) -> Tensor:
        """Pixels of packed latents [image tokens, latent width]: uint8 [height, width, 3]."""

    def decode_region(
        self, latents: Tensor, active: Tensor, width: int, height: int
    ) -> tuple[Tensor, tuple[int, int, int, int]]:
        """Pixels around the active tokens: (uint8 [bottom - top, right - left, 3], (left, top, right, bottom) in
        pixels). latents: all tokens', the template's where not active."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Image tokens of a picture as (rows, columns)."""

"""The interface between the runner and a model family, and the records that pass between them.

A family is one model architecture: it turns prompts, pictures and latents into one another, as functions on tensors. It
knows neither requests nor scheduling and holds no state of a request: what must survive from one step to the next is a
named tensor in the runner's tensor store. A denoising step is `predict`, with one row per prompt of the request, then
`combine_guidance`, then `advance`. The denoiser predicts a velocity, or the noise in UNets that were trained to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from core.errors import InvalidRequestError
from core.interpolation import Interpolation
from core.latent_space import LatentSpace
from core.model_info import ModelInfo
from core.page_scheme import PageDtype, PageLayout
from core.patches import PatchSet
from model_executor.host_weights import ON_DEVICE, Weights
from model_executor.models.boxes import Box
from model_executor.models.last import are_equal
from model_executor.page_cache.own_pages import OwnPages
from model_executor.page_cache.pages import Pages
from model_executor.parallel.group import Group
from model_executor.patches.adapters import Adapter, LoraFormat
from model_executor.samplers.sampling import State

Streamed = Callable[[int], Tensor | None]
"""Number of a block -> what another model adds to its output for this row, taken when the block has run; None: nothing.
In transformers, [active tokens, width]; in UNets, [channels, rows, columns] of a map, or of its `control_box`, where
those maps count that the way up joins, in the order of the way down, and then that of the middle."""

PreparedAdapter = Mapping[str, Any]
"""Part -> what an adapter changes in it, in a form that is put in use at once; see `PartPatches`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """An embedded prompt or class, as `Family.encode_text` and `encode_class` return it."""

    prompt_embeds: Tensor  # [text tokens, width]; padded to the length asked for, or as long as the prompt: per family
    pooled_prompt_embeds: Tensor  # [pooled width]; empty in families without a pooled prompt
    num_tokens: int  # tokens of the prompt that were used, without padding
    truncated: bool  # the prompt was longer than the length asked for, or than an encoder's own


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    """What `Family.encode_image` takes: a request's pictures, and the steps of its run.

    part: of all noise levels, the highest counted as 0 and the lowest as 1, those whose steps follow; cut as the SDXL
    pipelines cut them for `denoising_end` and `denoising_start`.
    shift: instead of what the scheduler does to noise levels. sigmas: instead of the pipeline's, evenly spaced.
    start: other latents that are noised instead of the template's; where a run starts from noise alone, they have no
    effect either. is_exact: the VAE computes in its own dtype; else it may in a faster one, as for `encode_template`
    and `decode_region`. cache_salt: see `CacheConfig.salt`; the encoder's result for a template, whole or without what
    is under the mask, is kept until the next one's, and used again for an equal one with the same salt, with equal
    results; None: neither.
    paged_reference_tokens: condition tokens of references whose keys and values are all read from pages; they are not
    encoded, and zeros are in their place. num_controls: control pictures of the run, for which the pipeline may have
    drawn first.
    """

    template: Tensor  # uint8 [height, width, 3]; the sides are multiples of the token size
    is_empty: bool = False  # it is an empty canvas: the picture is made of nothing
    mask: Tensor  # uint8 [height, width], 1 = edit
    seed: int
    num_inference_steps: int
    num_denoising_steps: int
    shift: float | None = None
    sigmas: tuple[float, ...] | None = None
    part: tuple[float, float] = (0.0, 1.0)
    start: Tensor | None = None  # clean latents [image tokens, latent width]
    starts_over: bool = False  # at full strength, too, the noise is over `start` or the template
    noise_first: bool = False  # the seed draws the noise before what the VAE samples of the template
    index: int = 0  # the noise is that of this picture, where the seed draws that of `number` in turn
    number: int = 1
    is_exact: bool = True
    cache_salt: str | None = None
    references: Sequence[Tensor] = ()  # uint8 [height, width, 3] each; the sides are multiples of the token size
    paged_reference_tokens: int = 0
    num_controls: int = 0
    is_recalled: bool = False  # the run begins with latents that an earlier request has kept

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on with latents that other steps have made: none are made here."""
        return self.part[0] > 0.0 or self.is_recalled

    @classmethod
    def blank(cls, side: int, num_inference_steps: int) -> Self:
        """A black square with all of it masked, for the last step alone. side: in pixels."""
        template = torch.zeros(side, side, 3, dtype=torch.uint8)
        mask = torch.ones_like(template[..., 0])
        return cls(template=template, mask=mask, seed=0, num_inference_steps=num_inference_steps, num_denoising_steps=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeredModel:
    """What a ControlNet must know of the model whose steps it steers."""

    family: str  # see `ModelInfo`
    config: Mapping[str, Any]  # of the denoiser
    num_train_timesteps: int  # of the scheduler
    token_size: int  # px of a token's side
    vae_scale: int  # px of a latent pixel's side
    latent_channels: int
    sees_mask: bool = False  # whether the denoiser's condition has the mask
    has_scores: bool = False  # whether it sees an aesthetic score instead of the target size
    latent_shift: float = 0.0  # what is subtracted from the VAE's latents, as they are scaled
    why_none: str = ""  # why no ControlNet goes with it; "": some may

    @property
    def recipe(self) -> str:
        """All of these, as text."""
        facts = self.family, self.num_train_timesteps, self.token_size, self.has_scores, self.latent_shift
        return " ".join(map(str, facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """Where sampling starts and what it is conditioned on, as `Family.encode_image` returns it. A width of 0: the
    family does not use it.
    """

    latents: Tensor  # [image tokens, latent width], at the first noise level; any where `ImageInputs.goes_on`
    condition: (
        Tensor  # [image tokens, condition width], what the denoiser sees of template and mask. Where template and
    )
    # references are tokens of their own: these, in this order; no rows where there are none
    outside: Tensor  # [image tokens, outside width], with which `Family.advance` keeps the template outside the mask
    sigmas: Tensor  # float32 [steps + 1], the noise levels before each step and after the last, where a run ends at 0
    state: State  # the sampler's, before the first step

    def begin(self, grid: tuple[int, int]) -> SamplingState:
        """The state before the first step. grid: image tokens as (rows, columns)."""
        return SamplingState(
            latents=self.latents, outside=self.outside, sigmas=self.sigmas, state=self.state, step=0, grid=grid
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingState:
    """The state of one request's sampling before a step; the runner makes it from the tensor store."""

    latents: Tensor  # these four as in `EncodedImage`, at `step`
    outside: Tensor
    sigmas: Tensor
    state: State
    step: int  # index into sigmas
    grid: tuple[int, int]  # image tokens as (rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt of one request in a forward pass: a request with classifier-free guidance has two rows.

    Without `active` every token is computed, and with `own` kept as pages. With it, `pages` supply the tokens that are
    not computed.
    """

    # From the request's image, set by the runner. Tokens that are not active are the template's where a block computes
    # them or `Family.sees_all_latents`, and are not read otherwise.
    latents: Tensor  # [image tokens, latent width], as `Family.denoiser_input` returns them
    condition: Tensor  # as in `EncodedImage`; may be the template as tokens of its own
    grid: tuple[int, int]  # image tokens as (rows, columns)
    references: tuple[tuple[int, int], ...] = ()  # condition tokens of each reference as (rows, columns)

    # From the request's prompt, one of the two, or its class: `EncodedText`.
    prompt_embeds: Tensor  # [text tokens, width]
    pooled_prompt_embeds: Tensor  # [pooled width]

    # Of the step.
    sigma: Tensor  # float32 scalar, its noise level
    guidance_scale: float  # the request's; read by denoisers that guidance was distilled into
    modulation: Tensor | None = None  # [1, width], this level's row of `Family.modulation`; None: computed in the pass

    # Of a mask-aware step, set by the runner from the engine's plan.
    active: Tensor | None = None  # int64 [active tokens], ascending indices of the tokens to compute; where pages have
    # a table, the last one may be repeated
    box: Box | None = None  # around `active`, in tokens; None: found when needed, which waits for a GPU
    pages: Pages | None = None  # the template's at this noise level, or its own
    own: OwnPages | None = None  # its own: made by a step without `active`, and there before a step with it reads them
    full_blocks: Collection[int] = ()  # pages of blocks that compute every token; in transformers the leading blocks

    # Of the request.
    patches: PatchSet = ()  # the adapters that change the layers for this row
    prompt_state: Tensor | None = None  # [text tokens, width], its `Family.prompt_state`; None: made in the pass
    is_negative: bool = False  # it is of the negative prompt; set where `Family.tells_negative`
    streamed: Streamed | None = None  # what other models add to the blocks, asked for block by block; None: nothing


@dataclass(frozen=True, slots=True)
class ModulationInputs:
    """What `Family.modulation` takes: what its table depends on, at all noise levels of a run."""

    pooled_prompt_embeds: Tensor  # as in `Row`
    guidance_scale: float
    sigmas: Tensor  # float32 [levels]
    num_rows: int  # of the request, which has a table for each
    patches: PatchSet = ()
    cache_salt: str | None = None  # see `CacheConfig.salt`; None: the table is not to be kept

    def equals(self, other: Self) -> bool:
        """See `last.Key`."""
        facts = (self.guidance_scale, self.num_rows, self.patches, self.cache_salt)
        are_alike = facts == (other.guidance_scale, other.num_rows, other.patches, other.cache_salt)
        has_prompt = are_alike and are_equal(self.pooled_prompt_embeds, other.pooled_prompt_embeds)
        return has_prompt and are_equal(self.sigmas, other.sigmas)

    def copy(self) -> Self:
        """See `last.Key`."""
        return replace(self, pooled_prompt_embeds=self.pooled_prompt_embeds.clone(), sigmas=self.sigmas.clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimeRow:
    """One chunk of priming one keyframe: all image tokens of a template, through some of the blocks."""

    # The template at the keyframe's noise level, from `Family.prime_inputs`.
    latents: Tensor  # [image tokens, latent width]
    condition: Tensor  # [image tokens, condition width], of an image with nothing masked
    grid: tuple[int, int]  # image tokens as (rows, columns)
    references: tuple[tuple[int, int], ...] = ()  # as in `Row`
    sigma: Tensor  # float32 scalar, the keyframe's noise level

    # The page scheme's priming prompt, embedded by `Family.encode_text`, and its guidance.
    prompt_embeds: Tensor  # [text tokens, width]
    pooled_prompt_embeds: Tensor  # [pooled width]
    guidance_scale: float
    patches: PatchSet = ()  # as in `Row`

    # Of this chunk, set by the runner.
    hidden: tuple[Tensor, ...] | None  # what the previous chunk returned; None for the first
    entry: Tensor  # uint8 [entry bytes], written; laid out as `core.page_scheme` says


class Family(ABC):
    """One model architecture, opened without weights. Parts with weights are put in use and dropped by name.

    Families share most of their code in `vae_family.VaeFamily`.
    """

    text_sees_template: ClassVar[bool] = False
    """Whether a prompt's embedding depends on the picture that the prompt is for."""

    sees_all_latents: ClassVar[bool] = False
    """Whether the denoiser reads the latents of tokens that no block computes; they must then be the template's."""

    tells_negative: bool = False
    """Whether the denoiser is told which row is the negative prompt's."""

    # ------------------------------------------------------------------------------------------------------- parts

    @property
    @abstractmethod
    def components(self) -> Mapping[str, tuple[str, ...]]:
        """Kind of component, as in a ModelKey -> parts of the checkpoint of this kind, named as in model_index.json."""

    @property
    @abstractmethod
    def latent_space(self) -> LatentSpace:
        """Whose latents this model can go on with."""

    @abstractmethod
    def info(self, name: str) -> ModelInfo:
        """What this model can do, read from its configuration alone. name: the one it is served under."""

    @abstractmethod
    def recipe(self, part: str) -> str:
        """All that `prepare` makes of a part depends on, besides its module. Families with equal recipes, and equal
        modules, can use the same prepared part."""

    @property
    @abstractmethod
    def text_recipe(self) -> str:
        """All that `encode_text` depends on, besides its arguments, the text encoders and the files of tokenizers and
        processor."""

    @abstractmethod
    def prepare(self, part: str, module: nn.Module) -> Any:
        """A loaded part in the form that it is computed with. Changes the module, which must not be used any more, but
        may be prepared again: weights that are packed for a CPU stay in it, and are found there."""

    @abstractmethod
    def put(self, part: str, prepared: Any) -> None:
        """Put a prepared part in use."""

    @abstractmethod
    def drop(self, part: str) -> None:
        """Stop using a part; its memory is freed once nothing else refers to it."""

    def weights(self, component: str) -> Weights:
        """Where the weights of this kind's loaded parts lie. `encode_text` and what uses the VAE bring them to the
        device."""
        return ON_DEVICE

    @property
    def steered(self) -> SteeredModel | None:
        """What ControlNets must know of this model; None: it has none."""
        return None

    @abstractmethod
    def use_graphs(self, is_wanted: bool) -> None:
        """Have the denoiser's steps be CUDA graphs, where they may be by the model's settings, or not; the graphs there
        are stay."""

    @abstractmethod
    def drop_graphs(self) -> None:
        """Free the memory of the denoiser's CUDA graphs, if there are any; steps are captured again as they come."""

    @property
    @abstractmethod
    def lora_format(self) -> LoraFormat:
        """How adapters of this family are read."""

    @abstractmethod
    def check_adapter(self, adapter: Adapter) -> None:
        """Raises ConfigError if the adapter does not fit; needs no weights."""

    @abstractmethod
    def prepare_adapter(self, adapter: Adapter, parts: Collection[str]) -> PreparedAdapter:
        """What an adapter changes in these loaded parts, for `put_adapter`. Changes nothing: any thread may call it.
        Raises ConfigError if it does not fit."""

    @abstractmethod
    def put_adapter(self, patch: str, prepared: PreparedAdapter) -> None:
        """Use a prepared adapter for requests with this patch."""

    @abstractmethod
    def drop_adapter(self, patch: str, parts: Collection[str]) -> None:
        """Stop using a patch's adapter, and drop it from these loaded parts."""

    @abstractmethod
    def lacking(self, patches: PatchSet) -> PatchSet:
        """Those of these patches whose adapters are not in use: a pass would leave them out without a word."""

    @abstractmethod
    def patches_of_text(self, patches: PatchSet) -> PatchSet:
        """Those of these patches on which a prompt's embedding depends."""

    # ------------------------------------------------------------------------------------------------------ encoding

    @property
    @abstractmethod
    def latents_dtype(self) -> torch.dtype:
        """What a run keeps its latents in between steps."""

    @abstractmethod
    def encode_text(
        self, prompt: str, max_sequence_length: int, pictures: Sequence[Tensor] = (), patches: PatchSet = ()
    ) -> EncodedText:
        """Embed a prompt, padded or cut to `max_sequence_length` tokens. pictures: uint8 [height, width, 3] each, that
        which the prompt is for and its references; the first is required where `text_sees_template`."""

    def encode_class(self, label: int | None) -> EncodedText:
        """What rows of a class are conditioned on, without text tokens. label: 0 .. `ModelInfo.num_classes` - 1; None
        stands for any class. Raises InvalidRequestError in families without classes."""
        raise InvalidRequestError("This model makes pictures of a prompt, not of a class.", param="class_label")

    def encode_nothing(self, text_tokens: int, template: Tensor, patches: PatchSet = ()) -> EncodedText:
        """What a row that asks for nothing is conditioned on: an empty prompt, or any class. text_tokens, template: as
        for `encode_text`."""
        return self.encode_text("", text_tokens, (template,), patches)

    def encode_longest(self, text_tokens: int, pictures: Sequence[Tensor]) -> EncodedText:
        """What a row with a prompt of `text_tokens` tokens is conditioned on, or of any class: as many tokens as a
        request may have. pictures: as for `encode_text`."""
        return self.encode_text("a " * text_tokens, text_tokens, pictures)  # no word is less than a token

    @abstractmethod
    def encode_image(self, inputs: ImageInputs) -> EncodedImage:
        """Encode a request's template and mask, and draw its noise."""

    def encode_controls(self, pictures: Sequence[Tensor], seed: int, *, is_exact: bool) -> list[Tensor]:
        """Control pictures, uint8 [height, width, 3] each, in the form that `ControlNet.embed` takes. seed, is_exact:
        as in `ImageInputs`. Only families with ControlNets are asked."""
        raise NotImplementedError(f"{type(self).__name__} has no ControlNets")

    @abstractmethod
    def encode_template(self, template: Tensor, *, cache_salt: str | None = None) -> Tensor:
        """Clean latents of a template, uint8 [height, width, 3]: the posterior's mode, [image tokens, latent width].
        cache_salt: as in `ImageInputs`."""

    @abstractmethod
    def upscale(
        self, latents: Tensor, grid: tuple[int, int], to_grid: tuple[int, int], method: Interpolation = "bilinear"
    ) -> Tensor:
        """Latents [image tokens, latent width] of a picture of another size, interpolated. grid, to_grid: image tokens
        as (rows, columns), of `latents` and of the result."""

    @abstractmethod
    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Image tokens of a picture of this size in pixels, as (rows, columns)."""

    # ------------------------------------------------------------------------------------------------------ priming

    @abstractmethod
    def page_layout(self, dtype: PageDtype) -> PageLayout:
        """The shape of this model's pages."""

    @abstractmethod
    def content_noise(self, clean: Tensor, noise_id: str) -> Tensor:
        """The noise that a template is primed with, decided by its content alone; shape, device, dtype of `clean`,
        [image tokens, latent width]. A GPU waits for its copy. noise_id: content id and cache salt; the first 16 hex
        digits (of the content id) seed the noise, and all of it is the key it is cached by."""

    @abstractmethod
    def prime_inputs(
        self, clean: Tensor, noise: Tensor, sigma: Tensor, references: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(latents, condition) of a template at noise level `sigma`: (1 - sigma) * clean + sigma * noise, and the
        condition of an image with nothing masked. clean: [image tokens, latent width]. noise: its `content_noise`.
        references: their clean latents, one after the other, [tokens, latent width]; None: there are none."""

    @abstractmethod
    def prime(self, rows: Sequence[PrimeRow], blocks: tuple[int, int]) -> list[tuple[Tensor, ...]]:
        """Run all tokens of each row through the blocks [start, stop), write these blocks' pages, and return each row's
        hidden state (empty after the last block, which computes keys and values only)."""

    # ---------------------------------------------------------------------------------------------------- denoising

    @abstractmethod
    def modulation(self, inputs: ModulationInputs) -> Tensor | None:
        """What the steps of a run compute from noise level and pooled prompt alone, for all levels at once, [levels,
        width]: one pass over those weights instead of one per step. None if the tables of all rows of the request would
        take too much memory."""

    def prompt_state(self, prompt_embeds: Tensor, patches: PatchSet = ()) -> Tensor | None:
        """What the steps of a run compute from a row's prompt alone, [text tokens, width]: keys and values of attention
        to it, where it does not change from block to block; or the prompt behind layers that see nothing else, which
        may have added tokens. None where steps compute it as they go."""
        return None

    @abstractmethod
    def denoiser_input(self, sample: SamplingState) -> Tensor:
        """The sample's latents as the denoiser takes them: a sampler may keep them at another scale."""

    @abstractmethod
    def predict(self, rows: Sequence[Row], group: Group | None = None) -> list[Tensor]:
        """Prediction for each row's active tokens, [active tokens, latent width], in one forward pass over all rows.

        group: of ranks that compute it together. All of them call this with the same rows and get the same tensors.
        Raises GroupBrokenError if the group is broken.
        """

    @abstractmethod
    def combine_guidance(self, predictions: Sequence[Tensor], scale: float) -> Tensor:
        """One prediction from those of all rows of a request: its prompt's and, with classifier-free guidance of this
        scale, its negative prompt's."""

    @abstractmethod
    def predict_clean(self, sample: SamplingState, prediction: Tensor) -> Tensor:
        """The clean latents that a prediction points at, [image tokens, latent width]. prediction: as for `advance`."""

    @abstractmethod
    def advance(self, sample: SamplingState, prediction: Tensor) -> tuple[Tensor, State]:
        """Latents and sampler state after a step. prediction: of all tokens, [image tokens, latent width]; the latents
        of tokens that were not computed are undefined, unless a velocity was given for them too."""

    # ------------------------------------------------------------------------------------------------------ decoding

    @abstractmethod
    def decode(self, latents: Tensor, width: int, height: int) -> Tensor:
        """Pixels of packed latents [image tokens, latent width]: uint8 [height, width, 3]."""

    @abstractmethod
    def decode_region(
        self, latents: Tensor, active: Tensor, width: int, height: int
    ) -> tuple[Tensor, tuple[int, int, int, int]]:
        """Pixels around the active tokens: (uint8 [bottom - top, right - left, 3], (left, top, right, bottom) in
        pixels). latents: of all tokens, where not active the template's or what the edit has made of them. active: in
        host memory, where the box around them is found."""

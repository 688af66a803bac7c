"""Input and output of `AsyncEngine.edit`: EditInput, ImageOutput and EditReport, plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.handles import CacheResult, Tier
from core.mask_request import MAX_FEATHER, MAX_GROW, MaskRequest
from core.messages.image_processor import Box, MaskKind, OutputFormat
from core.sampling_params import MAX_PADDING_MASK_CROP, MAX_PROMPT_CHARACTERS, SamplingParams
from core.validation import check_decimal, check_integer, check_length
from engine.client.control_input import ControlInput
from engine.client.input_files import NO_FILES, InputFiles
from engine.client.recall.recalled import Recalled
from engine.client.resolve.mask_aware import ExactReason
from engine.client.run_values import RunValue
from engine.client.upload import Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class EditInput:
    """One edit as requested by a caller: a picture, what to change in it, and how to encode the results. Its model and
    adapters are a ModelChoice beside it. Raises InvalidRequestError for a prompt that is too long, and a
    padding_mask_crop out of range; what depends on the model is checked when it is run.
    """

    # What to paint. Set by the caller.
    prompt: str
    class_label: int | str | None = None  # for models with classes: a class, or its name; None: the prompt is its name
    sampling: SamplingParams = field(default_factory=SamplingParams)
    is_batch: bool = False  # its images have one seed, which draws their noise in turn, instead of one each
    # The picture: at most one of image and template_id; neither = an empty canvas.
    image: Upload | None = None
    template_id: str | None = None  # a registered template of `owner`
    canvas_size: tuple[int, int] | None = None  # (width, height) of the canvas; None = the model's native square
    references: tuple[
        Upload, ...
    ] = ()  # further pictures for the model to look at, at most `ModelInfo.references.most`
    controls: tuple[ControlInput, ...] = ()  # at most MAX_CONTROLS, of types that the model has
    # The part to edit, see `PrepareImages`.
    mask: Upload | None = None
    mask_kind: MaskKind = "alpha"
    mask_request: MaskRequest | None = None  # a mask to find, instead of one that is given
    mask_grow: int = 0  # pixels of the picture, 0..MAX_GROW
    mask_feather: float = 0.0  # pixels of the picture, 0..MAX_FEATHER: deviation of the Gaussian that softens the edge
    makes_mask: bool = False  # the result is the file of the mask, as `mask` takes it
    padding_mask_crop: int | None = None  # pixels, 0..MAX_PADDING_MASK_CROP
    # Digest of the API key, "" without keys. A template made of the result has the same owner.
    owner: str = ""
    # For nodes of users' classes, by the names that the model's workflow declares. The prompt is one of them, too.
    inputs: Mapping[str, RunValue] = field(default_factory=dict)
    input_files: InputFiles = NO_FILES  # further ones
    # Results.
    output_size: tuple[int, int] | None = None  # (width, height); None = the upload's
    output_format: OutputFormat = "png"
    compression: int = 100  # 0..100, of jpeg and webp
    partial_images: int = 0  # previews per image, 0..3; at most one for each step before the last
    base64: bool = False  # base64 text instead of file bytes

    def __post_init__(self) -> None:
        check_length("prompt", self.prompt, MAX_PROMPT_CHARACTERS)
        if self.padding_mask_crop is not None:
            check_integer("padding_mask_crop", self.padding_mask_crop, 0, MAX_PADDING_MASK_CROP)
        check_integer("mask_grow", self.mask_grow, 0, MAX_GROW)
        check_decimal("mask_feather", self.mask_feather, 0, MAX_FEATHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMask:
    """A mask that was found for an edit."""

    score: float  # how sure the model is, 0..1
    box: Box | None  # around it, in pixels of the picture
    tokens: tuple[tuple[int, int], ...]  # runs of active tokens: the first one's index, row-major, and their number


@dataclass(frozen=True, slots=True, kw_only=True)
class EditReport:
    """How one image was made. Set by EditDelivery when the image is finished."""

    # The request, with the model's defaults.
    num_inference_steps: int
    steps_computed: int  # of them; the sampler went over the others in larger steps
    guidance_scale: float | None
    true_cfg_scale: float | None = None  # None: there was no such guidance
    shift: float | None = None  # None: the scheduler's own way
    sigmas: tuple[float, ...] | None = None  # None: evenly spaced
    unmasked: bool  # there was no mask: every token was edited
    found: FoundMask | None = None  # the mask that was found; None: none was asked for
    crop: Box | None = None  # part of the upload that was edited; None = the whole. Token counts are of this part
    # Tokens.
    mask_ratio: float  # tokens under the mask and its margin / image tokens
    active_tokens: int  # computed per mask-aware step; all image tokens in an exact run
    image_tokens: int
    reference_tokens: int = 0  # of references, which only full steps compute
    text_tokens: int
    prompt_truncated: bool
    # Mask-aware execution and the activation cache, see `core.messages.engine.Finished`.
    exact_reason: ExactReason | None = None  # why every token was computed; None = the edit ran mask-aware
    cache: CacheResult = "off"
    tier: Tier | None = None
    primed: bool = False
    full_steps: int = 0  # steps that computed every token
    full_blocks: int = 0
    recalled: Recalled | None = None  # what approximate caching did for it; None: it was not asked for
    # The result.
    partial_images: int = 0  # previews that were planned for it
    template_id: str | None = None  # template made of this image, if any
    values: Mapping[str, RunValue] = field(default_factory=dict)  # results of users' classes beside the picture
    colour_lost: tuple[str, ...] = ()  # colour information that the file cannot hold, see `Colour.lost_in`
    # Execution.
    steps_without_lora: int | None = None  # its first steps without adapters that were still loading; None: none were
    engine: int | None = None  # number of the engine that made it
    degrees: tuple[int, ...] = ()  # of each computed step, the number of its workers that computed it together
    ms: dict[str, float]  # milliseconds by part

    @property
    def cached_tokens(self) -> int:
        """Image tokens whose activations came from pages that were cached before."""
        return self.image_tokens - self.active_tokens if self.cache == "hit" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOutput:
    """A finished or partial image."""

    image_index: int  # 0..n-1
    partial_index: int | None  # 0, 1, ...; None = the final image
    data: memoryview  # the encoded file or its base64 text, in shared memory; valid until the edit's context is left
    width: int
    height: int
    seed: int
    report: EditReport | None = None  # of a final image

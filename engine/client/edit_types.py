"""What a caller of AsyncEngine hands in and gets back; plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from core.handles import Tier
from core.messages.image_processor import Box, MaskKind, OutputFormat
from core.sampling_params import SamplingParams
from engine.client.mask_aware import ExactReason
from engine.client.upload import Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class EditInput:
    """One edit: an image, what to change of it, and how the result is to look.

    image: None for a generation, on an empty canvas of `canvas_size` (width, height; None = the model's native square).
    model, lora: see `core.model_choice.choose_model`. template_id: a registered template of `owner`, instead of an
    image; a template made of the result is `owner`'s, too. mask, mask_kind and padding_mask_crop (0..65535): see
    `core.messages.image_processor`. output_size: (width, height), None = the upload's. compression: 0..100, jpeg and
    webp. partial_images: previews per image, 0..3; there are at most as many as steps before the last. base64: outputs
    as base64 text, not file bytes.
    """

    prompt: str
    sampling: SamplingParams = field(default_factory=SamplingParams)
    model: str = ""  # "" = the first model served
    lora: str = ""  # "" = no adapter
    image: Upload | None = None
    template_id: str | None = None
    owner: str = ""
    mask: Upload | None = None
    mask_kind: MaskKind = "alpha"
    padding_mask_crop: int | None = None
    canvas_size: tuple[int, int] | None = None
    output_size: tuple[int, int] | None = None
    output_format: OutputFormat = "png"
    compression: int = 100
    partial_images: int = 0
    base64: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EditReport:
    """How one image came about. mask_ratio: tokens under the mask and its margin / image tokens. active_tokens: those
    computed per step, which are all in an exact run. exact_reason: why it was one; None: it ran mask-aware. full_steps:
    steps that computed every token. cache, tier, primed, full_blocks: see `core.messages.engine.Finished`.
    partial_images: previews that came before it. ms: milliseconds by part. engine: the number of the engine that made
    it. template_id: the template that the image became, if it did. crop: the part of the upload that was edited, and
    that all token counts are of; None: the whole. colour_lost: see `engine.images.colour.Colour.lost_in`.
    """

    mask_ratio: float
    active_tokens: int
    image_tokens: int
    text_tokens: int
    prompt_truncated: bool
    unmasked: bool
    num_inference_steps: int
    guidance_scale: float | None
    ms: dict[str, float]
    exact_reason: ExactReason | None = None
    cache: Literal["hit", "miss", "off"] = "off"
    tier: Tier | None = None
    primed: bool = False
    full_steps: int = 0
    full_blocks: int = 0
    partial_images: int = 0
    engine: int | None = None
    template_id: str | None = None
    crop: Box | None = None
    colour_lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOutput:
    """A finished or partial image. data: the encoded file or its base64 text in shared memory, valid until the edit's
    context is left. partial_index: None for a final image, which alone has a report."""

    image_index: int
    partial_index: int | None
    data: memoryview
    width: int
    height: int
    seed: int
    report: EditReport | None = None

"""The table of request fields.

The OpenAPI schema is built from the same table. Ranges come from `core.sampling_params`; `SamplingParams` checks the
sampling fields that have no range here.
"""

from __future__ import annotations

import re
from typing import get_args

from core.control import MAX_CONTROL_SCALE, MAX_TYPE_CHARACTERS
from core.errors import InvalidRequestError
from core.mask_request import MAX_FEATHER, MAX_GROW
from core.sampling_params import (
    MAX_GUIDANCE,
    MAX_HIRES_SCALE,
    MAX_IMAGES,
    MAX_INFERENCE_STEPS,
    MAX_PADDING_MASK_CROP,
    MAX_PROMPT_CHARACTERS,
    MAX_REFINER_START,
    MAX_SEED,
    MAX_SHIFT,
    MAX_SIDE,
    MIN_HIRES_SCALE,
    MIN_REFINER_START,
    MIN_SHIFT,
    MIN_SIDE,
)
from core.selection import MAX_WORDS
from core.step_schedule import StepScheduleName
from core.validation import shorten
from entrypoints.openai.fields.class_field import ClassField
from entrypoints.openai.fields.each_field import EachField
from entrypoints.openai.fields.field import Field
from entrypoints.openai.fields.lora_field import LoraField
from entrypoints.openai.fields.mask_fields import BoxField, PointsField

QUALITY_FACTORS = {"low": 0.5, "medium": 1.0, "high": 2.0, "hd": 2.0, "xhigh": 3.0, "max": 4.0}
"""`quality` -> factor on the model's default number of steps."""

MAX_ASPECT = 3.0
"""Longer to shorter side of a generation; OpenAI's limit."""

_COMMON = (
    Field(
        "prompt",
        "string",
        "What to paint; of models with classes the name of one, unless class_label is given.",
        max_length=MAX_PROMPT_CHARACTERS,
    ),
    ClassField(
        "class_label", "integer", "Of models with classes: which to make a picture of, by number or name.", low=0
    ),
    Field("model", "string", "An id of /v1/models, also of a workflow; empty or omitted: the first model."),
    LoraField("lora", "string", "Adapters of the model, each with a scale, by default 1; empty or omitted: none."),
    Field(
        "steps_without_lora",
        "integer",
        "Most first steps that may run without adapters that are still loading; default 0: the request is refused.",
        0,
        MAX_INFERENCE_STEPS,
    ),
    Field("n", "integer", "Images to make.", 1, MAX_IMAGES),
    Field("size", "string", "Output size: auto or WIDTHxHEIGHT in pixels."),
    Field("response_format", "string", "b64_json; url is not supported.", choices=("b64_json", "url")),
    Field("output_format", "string", "File format of the result; default png.", choices=("png", "webp", "jpeg")),
    Field("output_compression", "integer", "Encoder quality of jpeg and webp; 100 is lossless webp.", 0, 100),
    Field("background", "string", "transparent is not supported.", choices=("auto", "opaque", "transparent")),
    Field(
        "quality",
        "string",
        "Steps relative to the model's default: low 0.5, medium 1, high and hd 2, xhigh 3, max 4. "
        "num_inference_steps wins.",
        choices=("auto", "standard", "low", "medium", "high", "hd", "xhigh", "max"),
    ),
    Field("stream", "boolean", "Answer with server-sent events."),
    Field("partial_images", "integer", "Previews to stream.", 0, 3),
    Field("user", "string", "Returned as safety_identifier.", max_length=512),
    Field("safety_identifier", "string", "Returned in the response.", max_length=512),
    Field("moderation", "string", "Not used.", choices=("low", "auto"), has_effect=False),
    Field("complexity", "string", "Not used.", choices=("low", "medium", "high"), has_effect=False),
    Field("frame_count", "integer", "Not used.", 2, 16, has_effect=False),
    Field("frame_duration_ms", "integer", "Not used.", 1, has_effect=False),
    Field("num_inference_steps", "integer", "Denoising steps.", 1, MAX_INFERENCE_STEPS),
    Field("steps", "integer", "Alias of num_inference_steps.", 1, MAX_INFERENCE_STEPS),
    Field(
        "step_schedule",
        "string",
        "Which denoising steps are computed: full, or those of the model's calibration; default: the server's.",
        choices=get_args(StepScheduleName),
    ),
    Field(
        "approximate_caching",
        "boolean",
        "Begin in a state that an earlier picture of a similar prompt has kept, if there is one, else keep some; of "
        "pictures without a mask. Default: the workflow's, else false.",
    ),
    Field("guidance_scale", "number", "Guidance scale: distilled or classifier-free, by model.", 0, MAX_GUIDANCE),
    Field(
        "true_cfg_scale",
        "number",
        "Classifier-free guidance scale of models whose guidance_scale is not one; needs negative_prompt.",
        0,
        MAX_GUIDANCE,
    ),
    Field(
        "shift",
        "number",
        "Shift of the noise levels, of models that sample by flow matching; default: as their scheduler does.",
        MIN_SHIFT,
        MAX_SHIFT,
    ),
    Field(
        "negative_prompt",
        "string",
        "What to avoid, for models with classifier-free guidance.",
        max_length=MAX_PROMPT_CHARACTERS,
    ),
    Field("seed", "integer", "Image i of n uses seed + i; -1 or omitted: random.", -1, MAX_SEED),
    Field("strength", "number", "How much of the template's content to replace.", 0, 1),
    Field(
        "hires_scale",
        "number",
        "Make the picture in two passes: smaller by this factor first, then enlarged and denoised again.",
        MIN_HIRES_SCALE,
        MAX_HIRES_SCALE,
    ),
    Field("hires_strength", "number", "How much of the enlarged picture the second pass replaces; default 0.6.", 0, 1),
    Field(
        "refiner_start",
        "number",
        "Of models with a refiner: the share of the noise levels, from the highest down, after which it takes over.",
        MIN_REFINER_START,
        MAX_REFINER_START,
    ),
    EachField(
        "control_type",
        "string",
        "What the control pictures show: a control type of the model; may be left out if it has one.",
        max_length=MAX_TYPE_CHARACTERS,
    ),
    EachField(
        "control_scale",
        "number",
        "How strongly control pictures steer; default 0.5 for edits with Stable Diffusion 1 and 2, else 1.",
        0,
        MAX_CONTROL_SCALE,
    ),
    EachField("control_start", "number", "Share of the steps before control pictures steer; default 0.", 0, 1),
    EachField("control_end", "number", "Share of the steps after which they do not any more; default 1.", 0, 1),
    Field("max_sequence_length", "integer", "Text tokens, up to the model's own length.", 1),
    Field("mask_aware", "boolean", "Compute only the tokens under the mask; default true."),
    Field("mask_margin", "integer", "Pixels by which the computed area extends beyond the mask.", 0),
    Field("full_steps", "integer", "Leading steps that compute every token.", 0),
    Field("template_id", "string", "A registered template, instead of an image.", max_length=512),
    Field(
        "padding_mask_crop",
        "integer",
        "Edit only the mask's box, grown by this many pixels, at the model's resolution, and paste it back.",
        0,
        MAX_PADDING_MASK_CROP,
    ),
    Field("priority", "integer", "Priority class: lower runs first; default 0."),
    Field("timeout", "number", "Seconds the edit may take; answers 503 or 504 as soon as it cannot be met."),
)

_OF_MASKS = (
    Field("mask_prompt", "string", "What to edit, in words, instead of a mask.", max_length=MAX_WORDS),
    PointsField(
        "mask_points",
        "string",
        "What to edit, by points of it: [[x, y], ...] in pixels; [x, y, -1] is a point of what is to be left out.",
    ),
    BoxField("mask_box", "string", "What to edit, by a box around it: [left, top, right, bottom] in pixels."),
    Field("mask_grow", "integer", "Pixels by which the mask is grown on each side.", 0, MAX_GROW),
    Field("mask_feather", "number", "Pixels over which the mask's edge is softened.", 0, MAX_FEATHER),
)

EDIT_FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        *_COMMON,
        *_OF_MASKS,
        Field("input_fidelity", "string", "Not used.", choices=("high", "low"), has_effect=False),
    )
}
GENERATION_FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        *_COMMON,
        Field("style", "string", "Not used.", choices=("vivid", "natural"), has_effect=False),
    )
}
ADAPTER_FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("lora_name", "string", "The name that requests choose it by: letters, digits and _ . : -"),
        Field("lora_path", "string", "A safetensors file on the server's machine, or a folder with one."),
        Field("model", "string", "The model id that it is for; empty or omitted: the first one."),
        Field("wait", "boolean", "Answer when requests may use it; false: at once, and it is loaded meanwhile."),
    )
}
MASK_FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        *_OF_MASKS,
        *(field for field in _COMMON if field.name in ("model", "template_id", "priority", "timeout")),
    )
}
TEMPLATE_FIELDS: dict[str, Field] = {field.name: field for field in _COMMON if field.name in ("model", "lora")}


def parse_size(text: str) -> tuple[int, int] | None:
    """`size` as (width, height) in pixels; None for auto. Raises InvalidRequestError."""
    if text == "auto":
        return None
    match = re.fullmatch(r"([1-9][0-9]{1,4})x([1-9][0-9]{1,4})", text)
    if match is None or not all(MIN_SIDE <= int(side) <= MAX_SIDE for side in match.groups()):
        message = (
            f"Invalid value: '{shorten(text)}'. Supported values are: 'auto', "
            f"and 'WIDTHxHEIGHT' with sides from {MIN_SIDE} to {MAX_SIDE} pixels."
        )
        raise InvalidRequestError(message, param="size")
    return int(match[1]), int(match[2])


def check_aspect(size: tuple[int, int]) -> None:
    """Raises InvalidRequestError for a `size` that no generation may have."""
    if max(size) > MAX_ASPECT * min(size):
        message = f"Invalid value: '{size[0]}x{size[1]}'. The aspect ratio must be between 1:3 and 3:1."
        raise InvalidRequestError(message, param="size")

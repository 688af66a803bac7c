"""The table of request fields: name, type, range, meaning. Parsing is strict: values are never coerced or clamped.

The OpenAPI schema is built from the same table. Ranges come from `core.sampling_params`; `SamplingParams` checks the
sampling fields that have no range here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import msgspec

from core.errors import InvalidRequestError
from core.sampling_params import (
    MAX_GUIDANCE,
    MAX_HIRES_SCALE,
    MAX_IMAGES,
    MAX_INFERENCE_STEPS,
    MAX_PADDING_MASK_CROP,
    MAX_PROMPT_CHARACTERS,
    MAX_SEED,
    MAX_SIDE,
    MIN_HIRES_SCALE,
    MIN_SIDE,
)
from core.step_schedule import StepScheduleName
from core.validation import check_choice, check_decimal, check_integer, check_length, shorten

Kind = Literal["string", "integer", "number", "boolean"]
Value = str | int | float | bool

T = TypeVar("T")
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_DECIMAL = re.compile(r"[+-]?([0-9]{1,30}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?")
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_KIND_OF_JSON = {str: "string", int: "integer", float: "number", bool: "boolean"}


def decode_json(data: bytes | bytearray | msgspec.Raw, type_: type[T]) -> T:
    """Decode JSON as `type_`. Raises InvalidRequestError (``invalid_json``) if it is malformed, and lets msgspec's
    ValidationError through if it has another type.
    """
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"Could not parse the JSON body: {error}.", code="invalid_json") from error


@dataclass(frozen=True)
class Field:
    """One scalar field of a request."""

    name: str
    kind: Kind
    meaning: str  # its description in the OpenAPI schema
    low: float | None = None  # bounds of a number, inclusive
    high: float | None = None
    choices: tuple[str, ...] = ()  # valid strings; empty: any
    max_length: int | None = None  # characters
    has_effect: bool = True  # False: valid values are accepted and listed in `stencil.ignored`

    def from_text(self, text: str) -> Value:
        """The value of a multipart text part. Raises InvalidRequestError."""
        match self.kind:
            case "string":
                return self._checked(text)
            case "integer" if _INTEGER.fullmatch(text):
                return self._checked(int(text))
            case "number" if _DECIMAL.fullmatch(text) or _NOT_FINITE.fullmatch(text):
                return self._checked(float(text))
            case "boolean" if text.lower() in ("true", "false"):
                return text.lower() == "true"
        raise self._invalid_type(f"'{shorten(text)}'")

    def from_json(self, raw: msgspec.Raw) -> Value | None:
        """The value of a JSON member; None for null. Raises InvalidRequestError."""
        if kind := {b"{": "object", b"[": "array"}.get(bytes(memoryview(raw)[:1])):
            raise self._invalid_type(kind)  # not worth decoding: it may hold a million values
        try:
            value: Any = decode_json(raw, object)
        except msgspec.ValidationError as error:  # well-formed, but a number beyond msgspec's range
            raise self._out_of_range() from error
        match self.kind, value:
            case _, None:
                return None
            case ("boolean", bool()) | ("string", str()):
                return self._checked(value)
            case ("integer" | "number", bool()):
                pass
            case "integer", int():
                return self._checked(value)
            case "number", int() | float():
                return self._checked(self._as_float(value))
        raise self._invalid_type(_KIND_OF_JSON[type(value)])

    def schema(self) -> dict[str, Any]:
        """The field's OpenAPI schema."""
        schema: dict[str, Any] = {"type": self.kind, "description": self.meaning}
        limits = {"minimum": self.low, "maximum": self.high, "maxLength": self.max_length, "enum": list(self.choices)}
        return schema | {key: limit for key, limit in limits.items() if limit not in (None, [])}

    def _checked(self, value: Value) -> Value:
        if isinstance(value, str):
            if self.choices:
                check_choice(self.name, value, self.choices)
            if self.max_length is not None:
                check_length(self.name, value, self.max_length)
        elif isinstance(value, float):
            check_decimal(self.name, value, self.low, self.high)
        elif not isinstance(value, bool):
            check_integer(self.name, value, _as_int(self.low), _as_int(self.high))
        return value

    def _as_float(self, value: float) -> float:
        try:
            return float(value)
        except OverflowError as error:  # an integer of more than 308 digits
            raise self._out_of_range() from error

    def _out_of_range(self) -> InvalidRequestError:
        return InvalidRequestError(f"Invalid '{self.name}': number out of range.", param=self.name)

    def _invalid_type(self, got: str) -> InvalidRequestError:
        article = "an" if self.kind == "integer" else "a"
        message = f"Invalid type for '{self.name}': expected {article} {self.kind}, but got {got} instead."
        return InvalidRequestError(message, param=self.name, code="invalid_type")


def _as_int(bound: float | None) -> int | None:
    return None if bound is None else int(bound)


QUALITY_FACTORS = {"low": 0.5, "medium": 1.0, "high": 2.0, "hd": 2.0, "xhigh": 3.0, "max": 4.0}
"""`quality` -> factor on the model's default number of steps."""

_COMMON = (
    Field("prompt", "string", "What to paint.", max_length=MAX_PROMPT_CHARACTERS),
    Field("model", "string", "A model id of /v1/models; empty or omitted: the loaded model."),
    Field("lora", "string", "An adapter of the model; empty or omitted: none.", max_length=512),
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
    Field("guidance_scale", "number", "Guidance scale: distilled or classifier-free, by model.", 0, MAX_GUIDANCE),
    Field(
        "true_cfg_scale",
        "number",
        "Classifier-free guidance scale of models whose guidance_scale is not one; needs negative_prompt.",
        0,
        MAX_GUIDANCE,
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

EDIT_FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        *_COMMON,
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

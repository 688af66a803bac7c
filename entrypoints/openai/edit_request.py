"""Turns a parsed request body into an EditInput: checks rules between fields, maps `quality` to steps, and finds the
fields that have no effect with this model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from core.errors import InvalidRequestError
from core.mask_request import mask_request
from core.messages.image_processor import MaskKind, OutputFormat
from core.model_choice import ModelChoice
from core.model_info import ModelInfo
from core.sampling_params import MAX_INFERENCE_STEPS, SamplingParams
from core.validation import check_filled
from engine.client.control_input import ControlInput, control_inputs
from engine.client.edit_types import EditInput
from entrypoints.openai.body.submission import Submission
from entrypoints.openai.fields.default_fields import OF_CONTROLS, left_open
from entrypoints.openai.fields.field import Field, Value
from entrypoints.openai.fields.fields import EDIT_FIELDS, GENERATION_FIELDS, QUALITY_FACTORS, check_aspect, parse_size

Operation = Literal["image_edit", "image_generation", "image_mask"]

_SAMPLING_FIELDS = (
    "step_schedule",
    "approximate_caching",
    "guidance_scale",
    "true_cfg_scale",
    "shift",
    "negative_prompt",
    "n",
    "strength",
    "hires_scale",
    "hires_strength",
    "refiner_start",
    "max_sequence_length",
    "mask_aware",
    "mask_margin",
    "full_steps",
    "steps_without_lora",
    "priority",
    "timeout",
)
NO_DEFAULTS: Mapping[str, Value] = {}
_MASK_AWARE_FIELDS = ("mask_margin", "full_steps")


@dataclass(frozen=True)
class ImagesCall:
    """A valid call: the engine's input, and the parts of the request that its answer repeats or depends on."""

    operation: Operation
    edit: EditInput
    choice: ModelChoice
    stream: bool  # answer with server-sent events
    quality: str | None  # as the answer repeats it; None: not given, or without effect
    background: str | None  # "opaque" if that had an effect, else None
    safety_identifier: str | None
    ignored: tuple[str, ...]  # fields without effect
    ignored_if_exact: tuple[str, ...]  # further ones if every token is computed


def build_call(
    operation: Operation,
    submission: Submission,
    choice: ModelChoice,
    owner: str = "",
    defaults: Mapping[str, Value] = NO_DEFAULTS,
) -> ImagesCall:
    """The call that a request makes. choice: what it names. owner: see EditInput. defaults: of the model's workflow.
    Raises InvalidRequestError.
    """
    is_edit, given, model = operation == "image_edit", submission.values, choice.model
    is_steered, length = bool(submission.controls), model.max_text_tokens
    values = {**given, **left_open(defaults, given, is_edit=is_edit, is_steered=is_steered, most_tokens=length)}
    refuse_unsupported(values)
    prompt = _require_prompt(values, model)
    if is_edit:
        _require_image(submission)
    size = parse_size(str(values.get("size", "auto")))
    if size and not is_edit:
        check_aspect(size)
    stream = bool(values.get("stream", False))
    sees_references = model.references is not None
    edit = EditInput(
        prompt=prompt,
        class_label=_class_label(values),
        sampling=_sampling(values, model),
        image=submission.uploads.get("image"),
        template_id=str(values["template_id"]) if is_edit and values.get("template_id") else None,
        owner=owner,
        references=tuple(submission.references.values()) if sees_references else (),
        controls=_controls(submission, values),
        mask=submission.uploads.get("mask") or submission.uploads.get("mask_image"),
        mask_kind=_mask_kind(submission),
        padding_mask_crop=cast(int | None, values.get("padding_mask_crop")) if is_edit else None,
        canvas_size=None if is_edit else size,
        output_size=size if is_edit else None,
        output_format=cast(OutputFormat, values.get("output_format", "png")),
        compression=cast(int, values.get("output_compression", 100)),
        partial_images=cast(int, values.get("partial_images", 0)) if stream else 0,
        base64=True,
        inputs=own_inputs(submission),
        input_files=submission.input_files,
        **(_of_mask(values) if is_edit else {}),
    )
    for_class = submission.own.fields if submission.own else {}  # which reads them, whatever they are to its model
    ignored = [name for name in _ignored(operation, values, choice) if name in given and name not in for_class]
    return ImagesCall(
        operation=operation,
        edit=edit,
        choice=choice,
        stream=stream,
        quality=_shown_quality(given),
        background="opaque" if values.get("background") == "opaque" and "background" not in ignored else None,
        safety_identifier=safety_identifier(values),
        ignored=(*ignored, *(() if sees_references else submission.references), *submission.ignored),
        ignored_if_exact=tuple(name for name in given if name in _MASK_AWARE_FIELDS and name not in for_class),
    )


def own_inputs(submission: Submission) -> dict[str, Any]:
    """What a request gives the workflow of users' classes that it names, or that its model has, files apart. Raises
    InvalidRequestError if an input is missing.
    """
    own = submission.own
    if own is None:
        return {}
    given = own.given_of(submission.values)
    known = {*given, *submission.own_pictures, *submission.own_tensors}
    if lacking := next((port.name for port in own.ports if not port.is_optional and port.name not in known), ""):
        raise missing(lacking)
    return given


def build_mask_call(submission: Submission, choice: ModelChoice, owner: str = "") -> ImagesCall:
    """The call that a request for a mask makes; the rest as `build_call`."""
    values = submission.values
    _require_image(submission)
    given = {name: values[name] for name in ("priority", "timeout") if name in values}
    edit = EditInput(
        prompt="",
        sampling=SamplingParams(**given),  # type: ignore[arg-type]
        image=submission.uploads.get("image"),
        template_id=str(values["template_id"]) if values.get("template_id") else None,
        owner=owner,
        makes_mask=True,
        base64=True,
        **_of_mask(values),
    )
    further = (*(name for name in submission.uploads if name != "image"), *submission.references, *submission.controls)
    ignored = (*further, *submission.ignored)
    return ImagesCall("image_mask", edit, choice, False, None, None, None, ignored, ())


def _controls(submission: Submission, said: Mapping[str, Value]) -> tuple[ControlInput, ...]:
    """The control pictures, and what is said of each. Raises InvalidRequestError."""
    pictures = list(submission.controls.values())
    values: dict[str, Any] = {name: said[name] for name in OF_CONTROLS if name in said}
    if values and not pictures:
        name = next(iter(values))
        raise InvalidRequestError(f"Invalid '{name}': there is no 'control_image'; give one.", param=name)
    return control_inputs(pictures, {name.removeprefix("control_"): each for name, each in values.items()})


def _of_mask(values: Mapping[str, Value]) -> dict[str, Any]:
    """What a request says of a mask that is to be found, or of one that is given. An empty text is none; an empty list
    of points asks for nothing. Raises InvalidRequestError."""
    if values.get("mask_points") == ():
        raise InvalidRequestError("Invalid 'mask_points': there is no point; leave it out.", param="mask_points")
    asked: dict[str, Any] = {name: values.get(f"mask_{name}") for name in ("prompt", "points", "box")}
    beside = {name: values[name] for name in ("mask_grow", "mask_feather") if name in values}
    request = mask_request(asked["prompt"] or None, asked["points"] or (), asked["box"])
    return {"mask_request": request, **beside}


def refuse_unsupported(values: Mapping[str, Value]) -> None:
    """Raises InvalidRequestError for a value that no request of this server may have."""
    for name, value in (("response_format", "url"), ("background", "transparent")):
        if values.get(name) == value:
            message = f"Unsupported value: '{name}' does not support '{value}' with this server."
            raise InvalidRequestError(message, param=name, code="unsupported_value")


def _require_prompt(values: Mapping[str, Value], model: ModelInfo) -> str:
    """The prompt; models with classes need none."""
    if model.num_classes:
        return str(values.get("prompt", ""))
    if "prompt" not in values:
        raise missing("prompt")
    prompt = str(values["prompt"])
    check_filled("prompt", prompt)
    return prompt


def _class_label(values: Mapping[str, Value]) -> int | str | None:
    """The class, by number or name; None if there is none, or an empty name."""
    given = values.get("class_label", "")
    return None if given == "" else cast(int | str, given)


def _require_image(submission: Submission) -> None:
    if "image" not in submission.uploads and not submission.values.get("template_id"):
        raise missing("image")


def _mask_kind(submission: Submission) -> MaskKind:
    if "mask" in submission.uploads and "mask_image" in submission.uploads:
        message = (
            "Use either 'mask' (transparent = edit) or 'mask_image' (white = edit), not both: "
            "they select the area to edit in opposite ways."
        )
        raise InvalidRequestError(message, param="mask_image")
    return "luminance" if "mask_image" in submission.uploads else "alpha"


def _sampling(values: Mapping[str, Value], model: ModelInfo) -> SamplingParams:
    given: dict[str, Any] = {name: values[name] for name in _SAMPLING_FIELDS if name in values}
    if values.get("seed", -1) != -1:
        given["seed"] = values["seed"]
    return SamplingParams(num_inference_steps=_steps(values, model), **given)


def _steps(values: Mapping[str, Value], model: ModelInfo) -> int | None:
    """Steps from `num_inference_steps`, its alias `steps`, or `quality`; None: the model's default."""
    if "steps" in values and "num_inference_steps" in values:
        raise InvalidRequestError("'steps' is an alias of 'num_inference_steps': give one of them.", param="steps")
    for name in ("num_inference_steps", "steps"):
        if name in values:
            return cast(int, values[name])
    factor = QUALITY_FACTORS.get(str(values.get("quality")))
    if factor is None:
        return None
    return min(MAX_INFERENCE_STEPS, max(1, round(model.default_num_inference_steps * factor)))


def _shown_quality(values: Mapping[str, Value]) -> str | None:
    """`quality` as the answer repeats it. OpenAI's answers have no `hd`, `standard` or `auto`."""
    quality = {"hd": "high"}.get(str(values.get("quality")), values.get("quality"))
    overruled = "num_inference_steps" in values or "steps" in values
    return str(quality) if quality in QUALITY_FACTORS and not overruled else None


def safety_identifier(values: Mapping[str, Value]) -> str | None:
    """As the answer repeats it; None: there is none."""
    return str(values.get("safety_identifier") or values.get("user") or "") or None


def _ignored(operation: Operation, values: Mapping[str, Value], choice: ModelChoice) -> list[str]:
    """Known and valid fields that have no effect with these models and this request, in the order of arrival."""
    fields = EDIT_FIELDS if operation == "image_edit" else GENERATION_FIELDS
    known = (name for name in values if name in fields)  # the others are inputs of a workflow
    void = () if choice.loras else ("steps_without_lora",)
    return [name for name in known if name in void or not _has_effect(fields[name], values, choice.model, operation)]


def _has_effect(field: Field, values: Mapping[str, Value], model: ModelInfo, operation: Operation) -> bool:
    match field.name:
        case "prompt":
            return not model.num_classes or not values["prompt"] or _class_label(values) is None
        case "negative_prompt" | "strength" | "max_sequence_length" | "hires_strength" | "approximate_caching" if (
            model.num_classes
        ):
            return False
        case "guidance_scale":
            return model.has_guidance
        case "true_cfg_scale":
            return model.has_true_cfg and "negative_prompt" in values
        case "negative_prompt" if model.is_guidance_cfg:
            scale = cast(float, values.get("guidance_scale", model.default_guidance_scale))
            return scale > model.neutral_guidance_scale
        case "negative_prompt":
            return model.has_true_cfg and cast(float, values.get("true_cfg_scale", model.default_true_cfg_scale)) > 1.0
        case "hires_strength":
            return "hires_scale" in values
        case "quality":
            return not {"num_inference_steps", "steps"} & values.keys() or values["quality"] in ("auto", "standard")
        case "output_compression":
            return values.get("output_format", "png") != "png"
        case "partial_images":
            return bool(values.get("stream")) or not values["partial_images"]
        case "background":
            # An edit keeps the upload's transparency outside the mask, unless the output format has none.
            is_opaque = operation == "image_generation" or values.get("output_format") == "jpeg"
            return values["background"] == "auto" or is_opaque
        case "template_id" | "padding_mask_crop":
            return operation == "image_edit"
        case "user":
            return not values.get("safety_identifier")  # which is returned instead
        case _:
            return field.has_effect


def missing(name: str) -> InvalidRequestError:
    """The error for a request that lacks a required field."""
    message = f"Missing required parameter: '{name}'."
    return InvalidRequestError(message, param=name, code="missing_required_parameter")

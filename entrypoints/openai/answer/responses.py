"""Builds the bodies of successful answers, JSON or server-sent events, as lists of parts: the images' base64 text stays
in shared memory and is not copied together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from engine.client.edit_types import EditReport, ImageOutput
from engine.client.resolve.mask_aware import ExactReason
from entrypoints.openai.answer.shown_values import shown_values
from entrypoints.openai.body.uploads import pieces_of
from entrypoints.openai.edit_request import ImagesCall

UNMASKED_NOTE = "No mask was given and the image has no transparent area: the whole image was regenerated."
EXACT_NOTES: dict[ExactReason, str] = {
    "disabled": "Every token was computed: the server runs with --no-mask-aware.",
    "unsafe": "Every token was computed: this checkpoint's calibration found mask-aware execution unsafe for it.",
    "mask_covers_all": "Every token was computed: the mask, grown by mask_margin, covers the whole image, or the whole "
    "crop of it that is edited.",
    "too_large": "Every token was computed: the picture is too large for the activation cache (--cache-host-bytes, or "
    "--cache-device-bytes where it is given).",
    "full_steps": "Every token was computed: full_steps covers all denoising steps.",
    "late_adapters": "Every token was computed: an adapter was still loading when the edit came.",
    "hires": "Every token was computed: with hires_scale both passes run exact.",
    "refined": "Every token was computed: pictures of a model with a refiner run exact.",
}
EXACT_NOTES |= {
    f"{kind}_{name}": EXACT_NOTES[name]
    for kind in ("selected", "controlled", "selected_controlled")
    for name in ("hires", "refined")
}
"""Notes for clients on why an edit ran exact although exact execution was not requested."""

NOT_RECALLED_NOTE = (
    "approximate_caching had no effect: it is for pictures of enough steps, without a mask, control pictures, refiner "
    "and second pass."
)

Parts = list[bytes | memoryview]


def images_response(call: ImagesCall, images: Sequence[ImageOutput]) -> Parts:
    """The JSON body for a call's final images, which must be sorted by index. What users' classes made beside one image
    is in `values`; beside several in `values` of each.
    """
    head = {"created": int(time.time())} | _echo(call, images[0])
    if call.quality:
        head["quality"] = call.quality
    if call.background:
        head["background"] = call.background
    tail = {"usage": usage(call, [_report(image) for image in images]), "stencil": stencil(call, images)}
    if len(images) == 1:
        tail |= _values(images[0])
    parts: Parts = [_open_object(head) + b',"data":[']
    for index, image in enumerate(images):
        about = {"seed": image.seed} | (_values(image) if len(images) > 1 else {})
        parts += [b'{"b64_json":"' if index == 0 else b',{"b64_json":"', image.data]
        parts.append(b'",' + msgspec.json.encode(about)[1:])
    parts.append(b"]," + msgspec.json.encode(tail)[1:])
    return parts


def mask_response(call: ImagesCall, image: ImageOutput) -> Parts:
    """The JSON body for a mask that was found."""
    report, found = _report(image), _report(image).found
    assert found is not None
    head = _open_object({"created": int(time.time())} | _echo(call, image)) + b',"data":[{"b64_json":"'
    shown = {"score": found.score, "box": found.box}
    parts = ("queue", "preprocess", "segment", "postprocess")
    about = {
        "ignored": call.ignored,
        "mask_ratio": report.mask_ratio,
        "image_tokens": report.image_tokens,
        "tokens": found.tokens,
        "ms": {part: round(report.ms[part], 3) for part in parts},
    }
    return [
        head,
        image.data,
        b'",' + msgspec.json.encode(shown)[1:] + b'],"stencil":' + msgspec.json.encode(about) + b"}",
    ]


def usage(call: ImagesCall, reports: Sequence[EditReport]) -> dict[str, Any]:
    """OpenAI's `usage` object. Input tokens are the text, the template and its references, counted once; output tokens
    are those of all images. Cached tokens stand in two places: where the images API has details, and where load tools
    for the chat API look for them.
    """
    cached = {"cached_tokens": reports[0].cached_tokens}
    text = reports[0].text_tokens
    image = reports[0].image_tokens + reports[0].reference_tokens if call.operation == "image_edit" else 0
    out = sum(report.image_tokens for report in reports)
    return {
        "total_tokens": text + image + out,
        "input_tokens": text + image,
        "output_tokens": out,
        "input_tokens_details": {"text_tokens": text, "image_tokens": image, **cached},
        "prompt_tokens_details": cached,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": out},
    }


def stencil(call: ImagesCall, images: Sequence[ImageOutput]) -> dict[str, Any]:
    """The `stencil` object of an answer. With several images, `seed`, `steps_computed` and `degrees` are the first
    one's, each part of `ms` is the maximum, `template_ids`, `steps_without_lora` and `approximate_caching` have an
    entry for each, `primed` and `full_blocks` cover all of them; the rest is equal for all.
    """
    reports = [_report(image) for image in images]
    first = reports[0]
    return {
        "ignored": [*call.ignored, *(call.ignored_if_exact if first.exact_reason else ())],
        "notes": _notes(call, first),
        "prompt_truncated": first.prompt_truncated,
        "seed": images[0].seed,
        "num_inference_steps": first.num_inference_steps,
        "steps_computed": first.steps_computed,
        "guidance_scale": first.guidance_scale,
        "true_cfg_scale": first.true_cfg_scale,
        "shift": first.shift,
        "sigmas": first.sigmas,
        "mask_ratio": first.mask_ratio,
        "active_tokens": first.active_tokens,
        "image_tokens": first.image_tokens,
        **_recalled(images, reports),
        **({} if first.found is None else {"mask": first.found}),
        "crop": first.crop,
        "cache": first.cache,
        "tier": first.tier,
        "primed": any(report.primed for report in reports),
        "full_steps": first.full_steps,
        "full_blocks": max(report.full_blocks for report in reports),
        "degrees": first.degrees,
        **_steps_without_lora(reports),
        **_template_ids(reports),
        "ms": {part: round(max(report.ms[part] for report in reports), 3) for part in first.ms},
    }


def _values(image: ImageOutput) -> dict[str, Any]:
    """What users' classes made beside a picture, if they made anything."""
    values = _report(image).values
    return {"values": shown_values(values)} if values else {}


def _recalled(images: Sequence[ImageOutput], reports: Sequence[EditReport]) -> dict[str, Any]:
    """What approximate caching did, if it was asked for, and the seed, which may be a source's; of several images for
    each."""
    recalled = [(image.seed, report.recalled) for image, report in zip(images, reports, strict=True)]
    shown = [{"seed": seed, **asdict(each)} for seed, each in recalled if each is not None]
    return {"approximate_caching": shown[0] if len(shown) == 1 else shown} if shown else {}


def _steps_without_lora(reports: Sequence[EditReport]) -> dict[str, Any]:
    """Of each image, if adapters were still loading when the request came."""
    steps = [report.steps_without_lora for report in reports]
    return {} if steps[0] is None else {"steps_without_lora": steps}


def _template_ids(reports: Sequence[EditReport]) -> dict[str, Any]:
    """The ids of the templates that the images became; null: none."""
    ids = [report.template_id for report in reports]
    return {"template_id": ids[0]} if len(ids) == 1 else {"template_ids": ids}


def _notes(call: ImagesCall, report: EditReport) -> list[str]:
    notes, made, asked = _notes_on_tokens(call, report), report.partial_images, call.edit.partial_images
    if made < asked:
        notes.append(f"{made} of {asked} partial images: the run has no more steps before its last one.")
    if report.recalled is not None and not report.recalled.can_recall:
        notes.append(NOT_RECALLED_NOTE)
    if report.colour_lost:
        names = ", ".join(report.colour_lost)
        notes.append(f"What the image says of its colours ({names}) is not in the result, which may look different.")
    return notes


def _notes_on_tokens(call: ImagesCall, report: EditReport) -> list[str]:
    if call.operation == "image_generation":  # computes every token by definition
        return []
    if report.unmasked:
        return [UNMASKED_NOTE]
    return [EXACT_NOTES[report.exact_reason]] if report.exact_reason in EXACT_NOTES else []


def image_event(call: ImagesCall, image: ImageOutput) -> Parts:
    """The server-sent event for a partial or final image."""
    is_partial = image.partial_index is not None
    name = f"{call.operation}.{'partial_image' if is_partial else 'completed'}"
    fields = {"created_at": int(time.time()), "size": f"{image.width}x{image.height}"}
    fields |= {"quality": call.quality or "auto", "background": call.background or "auto"}
    fields |= {"output_format": call.edit.output_format, "image_index": image.image_index}
    if is_partial:
        fields["partial_image_index"] = image.partial_index
    else:
        fields |= {"usage": usage(call, [_report(image)]), "stencil": stencil(call, [image])} | _values(image)
    if call.safety_identifier:
        fields["safety_identifier"] = call.safety_identifier
    head = f'event: {name}\ndata: {{"type":"{name}","b64_json":"'.encode()
    return [head, image.data, b'",' + msgspec.json.encode(fields)[1:] + b"\n\n"]


def error_event(envelope: dict[str, Any]) -> bytes:
    """The last event of a stream that failed after its status 200 was sent."""
    return b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": envelope}) + b"\n\n"


def send_pieces(parts: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The parts in pieces of at most 256 KiB, copied, as a transport may keep one longer than shared memory lives."""
    for part in parts:
        yield from pieces_of(part)


def _echo(call: ImagesCall, image: ImageOutput) -> dict[str, Any]:
    echo = {"output_format": call.edit.output_format, "size": f"{image.width}x{image.height}"}
    if call.safety_identifier:
        echo["safety_identifier"] = call.safety_identifier
    return echo


def _open_object(fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode(fields)[:-1]


def _report(image: ImageOutput) -> EditReport:
    if image.report is None:
        raise ValueError("a final image has no report")
    return image.report

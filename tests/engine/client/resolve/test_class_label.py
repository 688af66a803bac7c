"""Which class a request asks a picture of, and what models with classes refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fakes
import msgspec
import pytest

from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from engine.client.edit_types import EditInput
from engine.client.resolve.class_label import chosen_class
from engine.client.resolve.sampling_defaults import resolve
from engine.client.upload import BytesUpload

CLASSES = msgspec.structs.replace(
    fakes.MODEL,
    num_classes=10,
    class_names={"tench": 0, "Tinca tinca": 0, "goldfish": 1},
    max_text_tokens=0,
    has_guidance=True,
    is_guidance_cfg=True,
    default_guidance_scale=4.0,
)
NAMELESS = msgspec.structs.replace(CLASSES, class_names={})
EMPTY = EditInput(prompt="")
UPLOAD = BytesUpload(b"a picture")


@pytest.mark.parametrize(
    ("wanted", "label"),
    [
        ({"class_label": 0}, 0),
        ({"class_label": 9}, 9),
        ({"class_label": "Tinca tinca"}, 0),
        ({"class_label": 1, "prompt": "tench"}, 1),
        ({"prompt": "goldfish"}, 1),
    ],
)
def test_a_class_is_named_by_number_name_or_prompt(wanted: dict[str, Any], label: int) -> None:
    assert chosen_class(replace(EMPTY, **wanted), CLASSES) == label


@pytest.mark.parametrize(
    ("model", "wanted", "param", "told"),
    [
        (CLASSES, {}, "class_label", "Missing required parameter: 'class_label'.*from 0 to 9.*GET /v1/models"),
        (NAMELESS, {}, "class_label", "its classes have no names"),
        (CLASSES, {"class_label": 10}, "class_label", "<= 9"),
        (CLASSES, {"class_label": -1}, "class_label", ">= 0"),
        (CLASSES, {"class_label": "pike"}, "class_label", "no class named 'pike'"),
        (CLASSES, {"prompt": "a red hat"}, "class_label", "no class named 'a red hat'"),
        (CLASSES, {"class_label": 1, "image": UPLOAD}, "image", "edits none: use /v1/images/generations"),
        (CLASSES, {"class_label": 1, "template_id": "t"}, "template_id", "edits none"),
        (CLASSES, {"class_label": 1, "mask": UPLOAD}, "mask", "edits none"),
        (CLASSES, {"class_label": 1, "canvas_size": (64, 32)}, "size", "give 'auto' or a square"),
        (CLASSES, {"class_label": 1, "sampling": SamplingParams(hires_scale=2.0)}, "hires_scale", "leave it out"),
        (fakes.MODEL, {"class_label": 1}, "class_label", "makes pictures of a prompt; leave"),
        (fakes.MODEL, {"class_label": "tench", "prompt": "a"}, "class_label", "makes pictures of a prompt"),
    ],
)
def test_what_cannot_be_made_is_refused_with_a_remedy(
    model: Any, wanted: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        chosen_class(replace(EMPTY, **wanted), model)
    assert caught.value.param == param


def test_models_with_prompts_have_no_class() -> None:
    assert chosen_class(EditInput(prompt="tench"), fakes.MODEL) is None


def test_what_belongs_to_prompts_and_pictures_has_no_effect() -> None:
    """Without guidance a step has one row, with it two."""
    given = SamplingParams(max_sequence_length=12, negative_prompt="a hat", strength=0.2, num_inference_steps=5)
    resolved = resolve(given, CLASSES)
    assert (resolved.max_sequence_length, resolved.num_denoising_steps) == (None, 5)
    assert (resolved.guidance_scale, resolved.true_cfg_scale, resolved.num_rows) == (4.0, 4.0, 2)
    assert resolve(SamplingParams(guidance_scale=1.0, negative_prompt="a hat"), CLASSES).num_rows == 1

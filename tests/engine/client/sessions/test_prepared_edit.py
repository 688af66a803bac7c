"""The requests of an edit of two passes."""

from __future__ import annotations

import fakes
import msgspec
import pytest

from core.config import EngineConfig
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.handles import ArrayRef
from core.messages.engine import EngineRequest
from core.messages.image_processor import PreparedCanvas, PreparedImages
from core.model_choice import ModelChoice
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams
from core.vision_tokens import VisionTokens
from engine.client.edit_types import EditInput
from engine.client.resolve.chosen_workflow import chosen_workflow
from engine.client.resolve.sampling_defaults import resolve
from engine.client.sessions.edit_requests import EditRequests
from engine.client.sessions.prepared_edit import PreparedEdit

FINAL = PreparedImages(
    job_id=0,
    upload_width=250,
    upload_height=128,
    width=256,
    height=128,
    template=ArrayRef(0, 0, (128, 256, 3), "uint8"),
    mask=ArrayRef(0, 98304, (128, 256), "uint8"),
    active=ArrayRef(0, 131072, (40,), "int32"),
    content_id="c",
    unmasked=False,
)
FIRST = PreparedCanvas(
    width=128,
    height=64,
    template=ArrayRef(0, 131328, (64, 128, 3), "uint8"),
    mask=ArrayRef(0, 155904, (64, 128), "uint8"),
    active=ArrayRef(0, 164096, (12,), "int32"),
)


def prepared(model: ModelInfo = fakes.MODEL, *, partial_images: int = 0, **fields: object) -> PreparedEdit:
    sampling = SamplingParams(num_inference_steps=5, **fields)  # type: ignore[arg-type]
    edit = EditInput(prompt="p", sampling=sampling, partial_images=partial_images)
    workflow = chosen_workflow(model, sampling, None)
    images = msgspec.structs.replace(FINAL, canvases={"first": FIRST} if workflow is HIRES else {})
    return PreparedEdit(edit, ModelChoice(model), resolve(sampling, model), images, EngineConfig(), workflow)


def request_of(edit: PreparedEdit) -> EngineRequest:
    def alloc(nbytes: int) -> ArrayRef:
        return ArrayRef(0, 0, (nbytes,), "uint8")

    return EditRequests(edit, alloc).make(0, "a", arrival=0.0, call_id="a", trace_context="")


def test_two_passes_have_two_canvases() -> None:
    edit = prepared(hires_scale=2.0, hires_strength=0.6)
    request = request_of(edit)
    spec, first = request.spec, request.spec.canvas("first")
    assert request.workflow == "hires"
    assert edit.rounds == (5, 3)
    assert (spec.width, spec.height, spec.num_tokens, spec.template) == (256, 128, 128, FINAL.template)
    assert (first.width, first.height, first.num_tokens) == (128, 64, 32)
    assert (first.template, first.mask, first.active) == (FIRST.template, FIRST.mask, FIRST.active)
    assert first.max_text_tokens == spec.max_text_tokens
    assert spec.pixels.shape == (128, 256, 3)


def test_one_pass_has_one_canvas() -> None:
    edit = prepared()
    request = request_of(edit)
    assert (request.workflow, request.spec.canvases, edit.rounds) == (INPAINT.name, {}, (5,))


def test_the_prompt_is_encoded_once_with_the_final_template() -> None:
    """A text encoder that sees the picture gives as many tokens in both passes; condition tokens are each pass's."""
    vision = VisionTokens(side=28, min_pixels=28**2, max_pixels=2**20)
    model = msgspec.structs.replace(fakes.MODEL, vision=vision, conditions_per_token=1)
    spec = request_of(prepared(model, hires_scale=2.0)).spec
    assert spec.canvas("first").num_text_tokens == spec.num_text_tokens == 24 + vision.count(256, 128)
    assert (spec.canvas("first").num_condition_tokens, spec.num_condition_tokens) == (32, 128)


@pytest.mark.parametrize(("strength", "expected"), [(0.6, 2), (0.2, 0)])
def test_previews_are_of_the_second_pass(strength: float, expected: int) -> None:
    assert prepared(hires_scale=2.0, hires_strength=strength, partial_images=3).num_partial_images == expected


def test_all_steps_of_both_passes_are_reported() -> None:
    edit = prepared(hires_scale=2.0, hires_strength=0.6, strength=0.4)
    assert edit.exact_reason == "hires"
    assert edit.num_denoising_steps == edit.num_full_steps == 2 + 3
    assert not request_of(edit).spec.is_mask_aware

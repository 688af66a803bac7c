"""The requests of edits whose mask is to be found: how they run is what they would do with this mask given."""

from __future__ import annotations

from collections.abc import Sequence

import fakes
import msgspec
import pytest
from cache_kit import SCHEME
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import EngineConfig
from core.errors import InvalidRequestError
from core.graph.workflows.find_mask import FIND_MASK
from core.handles import ArrayRef
from core.mask_request import MaskRequest
from core.messages.image_processor import PreparedImages
from core.messages.specs import EditSpec, MaskSpec
from core.model_choice import ModelChoice
from core.model_info import ModelInfo
from core.sampling_params import SamplingParams
from core.selection import Selection
from core.step_schedule import StepSchedule
from engine.client.edit_types import EditInput
from engine.client.resolve.chosen_workflow import chosen_workflow
from engine.client.resolve.sampling_defaults import resolve
from engine.client.sessions.edit_requests import EditRequests
from engine.client.sessions.prepared_edit import PreparedEdit

IMAGES = PreparedImages(
    job_id=0,
    upload_width=512,
    upload_height=256,
    width=256,
    height=128,
    template=ArrayRef(0, 0, (128, 256, 3), "uint8"),
    mask=ArrayRef(0, 98304, (128, 256), "uint8"),
    active=ArrayRef(0, 131072, (128,), "int32"),
    content_id="c",
    unmasked=False,
)
ASKED = MaskRequest(prompt="a hat", points=((256, 64, -1),))
FINDS = msgspec.structs.replace(fakes.MODEL, page_scheme=SCHEME, can_skip_steps=True)


def prepared(
    model: ModelInfo = FINDS, *, makes_mask: bool = False, grow: int = 0, feather: float = 0.0, **fields: object
) -> PreparedEdit:
    sampling = SamplingParams(num_inference_steps=5, **fields)  # type: ignore[arg-type]
    wish = {"mask_request": ASKED, "mask_grow": grow, "mask_feather": feather, "makes_mask": makes_mask}
    edit = EditInput(prompt="p", sampling=sampling, **wish)  # type: ignore[arg-type]
    workflow = FIND_MASK if makes_mask else chosen_workflow(model, sampling, None, finds_mask=True)
    known = PreparedEdit(edit, ModelChoice(model), resolve(sampling, model), IMAGES, EngineConfig(), workflow)
    return known.with_usual_mask(0.25)


def spec_of(edit: PreparedEdit, sizes: list[int] | None = None) -> EditSpec | MaskSpec:
    def alloc(nbytes: int) -> ArrayRef:
        (sizes if sizes is not None else []).append(nbytes)
        return ArrayRef(0, 4096, (nbytes,), "uint8")

    spec = EditRequests(edit, alloc).make(0, "a", arrival=0.0, call_id="a", trace_context="").spec
    assert isinstance(spec, EditSpec | MaskSpec)
    return spec


def test_the_mask_has_memory_of_its_own_and_a_predicted_size() -> None:
    sizes: list[int] = []
    spec = spec_of(prepared(), sizes)
    assert spec.active == ArrayRef(0, 4096 + 128 * 256, (32,), "int32"), "a quarter of 128 tokens"
    assert spec.mask == ArrayRef(0, 4096, (128, 256), "uint8")
    assert sizes[0] == 128 * 256 + 4 * 128
    assert spec.search is not None
    assert spec.search.selection == Selection("a hat", (msgspec.structs.replace(spec.search.selection.points[0]),))
    point = spec.search.selection.points[0]
    assert (point.x, point.y, point.adds) == (0.5, 0.25, False)


def test_lengths_are_of_the_size_that_the_engine_sees() -> None:
    spec = spec_of(prepared(grow=10, feather=4.0, mask_margin=8))
    assert spec.search is not None
    assert (spec.search.grow, spec.search.margin) == (5, 8 + 4)


@given(
    st.floats(0, 1),
    st.lists(st.floats(0, 1), max_size=2),
    st.integers(0, 5),
    st.sampled_from(["full", "calibrated"]),
)
@settings(max_examples=60)
def test_every_size_of_the_mask_runs_as_if_it_were_given(
    full_from: float, schedules_from: Sequence[float], full_steps: int, schedule: str
) -> None:
    scheme = msgspec.structs.replace(SCHEME, full_steps=full_steps, full_steps_of=5, full_steps_from=full_from)
    schedules = tuple(
        StepSchedule(
            num_inference_steps=steps,
            computed=(0, 1, 3),
            full_steps=(0, 1),
            full_steps_from=share,
            ssim_mean=1,
            ssim_p10=1,
        )
        for steps, share in zip((5, 8), schedules_from, strict=False)
    )
    model = msgspec.structs.replace(FINDS, page_scheme=scheme, step_schedules=schedules)
    name = schedule if schedules else "full"
    edit = prepared(model, step_schedule=name)
    spec = spec_of(edit)
    assert isinstance(spec, EditSpec)
    for found in range(1, edit.num_tokens + 1):
        known, expected = spec.with_mask(found), edit.with_mask(found)
        assert known.is_mask_aware == (expected.exact_reason is None)
        assert known.sampling.full_steps == (expected.sampling.full_steps or 0)
        assert known.sampling.own_page_steps == (expected.sampling.own_page_steps or ())


def test_a_mask_alone_is_no_picture() -> None:
    edit = prepared(makes_mask=True)
    spec = spec_of(edit)
    assert isinstance(spec, MaskSpec)
    assert (edit.rounds, edit.num_partial_images) == ((), 0)
    assert {name: each.array for name, each in spec.outputs.items()} == {"mask": spec.mask}
    assert spec.search.runs == ()


def test_a_point_outside_is_refused_once_the_size_is_known() -> None:
    edit = prepared()
    beyond = msgspec.structs.replace(IMAGES, upload_width=200)
    edit = PreparedEdit(edit.edit, edit.choice, edit.asked, beyond, edit.config, edit.graph)
    with pytest.raises(InvalidRequestError) as caught:
        spec_of(edit.with_usual_mask(0.2))
    assert caught.value.param == "mask_points"

"""Who takes part in approximate caching, and who is refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from fakes import MODEL

from core.config import EngineConfig, StencilConfig
from core.errors import InvalidRequestError
from core.graph.catalog import WORKFLOWS
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.handles import NOWHERE
from core.messages.image_processor import PrepareImages
from core.model_choice import ModelChoice
from core.sampling_params import SamplingParams
from core.skip_level import SkipLevel
from engine.client.edit_types import EditInput
from engine.client.recall.edit_recall import without_steps
from engine.client.resolve.approximate import can_recall, wants_caching
from engine.client.resolve.sampling_defaults import resolve
from engine.client.sessions.prepared_edit import PreparedEdit
from engine.images.image_ops import prepare_nothing

LEVEL = SkipLevel(share=0.4, similarity=0.9, ssim_mean=0.98, ssim_p10=0.97, num_pairs=8)
ABLE, CONFIG = msgspec.structs.replace(MODEL, skip_levels=(LEVEL,)), StencilConfig(approximate_cache_bytes=1)
ON, OFF, OPEN = (SamplingParams(approximate_caching=on) for on in (True, False, None))
WORKFLOW = replace(INPAINT, approximate_caching=True)


def test_a_request_or_its_workflow_asks() -> None:
    assert wants_caching(ON, ABLE, INPAINT, CONFIG)
    assert wants_caching(OPEN, ABLE, WORKFLOW, CONFIG)
    assert not wants_caching(OPEN, ABLE, INPAINT, CONFIG)
    assert not wants_caching(OFF, ABLE, WORKFLOW, CONFIG), "a request wins over its workflow"


def test_what_the_server_cannot_do_is_refused_to_requests_and_left_out_for_workflows() -> None:
    for model, config, remedy in (
        (ABLE, StencilConfig(), "have it started with --approximate-cache-bytes, or leave it out"),
        (MODEL, CONFIG, "m has no calibrated skip levels; run python -m entrypoints.calibrate --skip-levels"),
    ):
        with pytest.raises(InvalidRequestError, match=remedy) as refusal:
            wants_caching(ON, model, INPAINT, config)
        assert refusal.value.param == "approximate_caching"
        assert not wants_caching(OPEN, model, WORKFLOW, config)
    assert not wants_caching(ON, msgspec.structs.replace(ABLE, num_classes=10), INPAINT, CONFIG), "it has no effect"


def test_samplers_that_remember_steps_and_edits_of_a_part_take_no_part() -> None:
    job = PrepareImages(0, None, None, "luminance", (256, 256), 0, 256, 16, 256**2, NOWHERE)
    images, sampling = prepare_nothing(job), resolve(ON, ABLE)
    edit = EditInput(prompt="p", sampling=ON)
    whole = PreparedEdit(edit, ModelChoice(ABLE), sampling, images, EngineConfig(), INPAINT)

    def able(each: PreparedEdit) -> bool:
        return can_recall(each, ABLE.skip_levels, WORKFLOWS)

    assert able(whole)
    for change in ({"remembers_steps": True}, {"solver_order": 2}, {"extra_steps": 1}):
        other = msgspec.structs.replace(ABLE, **change)
        assert not able(replace(whole, choice=ModelChoice(other))), change
    assert not able(replace(whole, prepared=msgspec.structs.replace(images, unmasked=False)))
    assert not able(replace(whole, choice=ModelChoice(ABLE, steps_without=2)))
    assert not able(replace(whole, graph=HIRES))
    assert not able(replace(whole, asked=msgspec.structs.replace(sampling, num_inference_steps=2))), "none to skip"


@pytest.mark.parametrize("steps", [1, 7, 8, 28, 50, 200])
@pytest.mark.parametrize("strength", [1.0, 0.8, 0.31])
@pytest.mark.parametrize("computed", [None, 3])
def test_the_rest_of_a_run_has_the_steps_that_are_not_skipped(
    steps: int, strength: float, computed: int | None
) -> None:
    schedule = None if computed is None else tuple(range(0, steps, computed))
    sampling = SamplingParams(num_inference_steps=steps, strength=strength, computed_steps=schedule)
    whole = sampling.computed_of_last(sampling.num_denoising_steps)
    for skipped in range(len(whole)):
        rest = without_steps(sampling, skipped)
        kept = rest.computed_of_last(rest.num_denoising_steps)
        first = sampling.num_denoising_steps - rest.num_denoising_steps
        assert tuple(first + step for step in kept) == whole[skipped:]

"""Which workflow of a user serves a request, by the model that names it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from fakes import MODEL
from run_workflows import CLASSES, GUARDED

from core.errors import InvalidRequestError
from core.graph.catalog import with_registered
from core.graph.op import Port
from core.graph.workflow import Region
from core.graph.workflows.hires import HIRES
from core.graph.workflows.inpaint import INPAINT
from core.graph.workflows.refined import REFINED
from core.sampling_params import SamplingParams
from engine.client.resolve.chosen_workflow import chosen_workflow, rounds_of
from engine.client.resolve.sampling_defaults import resolve

GENERATING = replace(GUARDED, name="generating", inputs=(GUARDED.inputs[0], *GUARDED.inputs[-2:]))
WORKFLOWS = with_registered([GUARDED, GENERATING], {each.name for each in CLASSES})
SAMPLING = resolve(SamplingParams(), MODEL)


def chosen(name: str, *, finds_mask: bool = False, is_controlled: bool = False) -> str:
    model = msgspec.structs.replace(MODEL, workflow=name)
    found = chosen_workflow(
        model, SAMPLING, None, finds_mask=finds_mask, is_controlled=is_controlled, workflows=WORKFLOWS
    )
    return found.name


def test_it_is_the_one_for_what_the_request_gives() -> None:
    assert chosen("guarded") == "guarded"
    assert chosen("guarded", finds_mask=True) == "selected_guarded"
    assert chosen("guarded", finds_mask=True, is_controlled=True) == "selected_controlled_guarded"
    assert chosen("generating", is_controlled=True) == "controlled_generating"


def test_one_without_a_mask_finds_none() -> None:
    with pytest.raises(InvalidRequestError, match="workflow 'generating' takes none") as refused:
        chosen("generating", finds_mask=True)
    assert refused.value.param == "mask"


def test_an_error_says_the_name_that_users_give() -> None:
    """And not the digest that engines know it by, of one that was registered while the server runs."""
    added = msgspec.structs.replace(MODEL, workflow="added@12ab")
    workflows = with_registered([replace(GENERATING, name="added@12ab")], {each.name for each in CLASSES})
    with pytest.raises(InvalidRequestError, match="workflow 'added' takes none"):
        chosen_workflow(added, SAMPLING, None, finds_mask=True, workflows=workflows)


def test_one_that_needs_a_picture_gets_one() -> None:
    """Generations give none."""
    needing = replace(INPAINT, name="needing", inputs=(INPAINT.inputs[0], Port("template", "picture")))
    workflows, model = with_registered([needing], ()), msgspec.structs.replace(MODEL, workflow="needing")
    assert chosen_workflow(model, SAMPLING, None, is_edit=True, workflows=workflows) is needing
    with pytest.raises(InvalidRequestError, match="makes no pictures without it; give it") as refused:
        chosen_workflow(model, SAMPLING, None, workflows=workflows)
    assert refused.value.param == "image"


def test_a_workflow_may_say_itself_where_the_refiner_takes_over() -> None:
    """Then requests cannot, and have at least a step for each of the two models."""
    regions = (Region("denoise", end=0.6), Region("refine", begin=0.6))
    fixed = replace(REFINED, name="fixed", regions=regions, inputs=REFINED.inputs[:-1])
    roles = dict.fromkeys(("refiner", "refiner_vae", "refiner_text_encoder"), "polish")
    model = msgspec.structs.replace(MODEL, workflow="fixed", roles=roles)
    workflows = with_registered([fixed], ())
    sampling = resolve(SamplingParams(), model, workflow=fixed)
    assert chosen_workflow(model, sampling, None, workflows=workflows) is fixed
    asked = resolve(SamplingParams(refiner_start=0.5), model, workflow=fixed)
    with pytest.raises(InvalidRequestError, match="makes no pictures with it; leave it out"):
        chosen_workflow(model, asked, None, workflows=workflows)
    with pytest.raises(InvalidRequestError, match="one step is run, which leaves none for the refiner; give more"):
        resolve(SamplingParams(num_inference_steps=1), model, workflow=fixed)
    assert resolve(SamplingParams(), model, workflow=REFINED).refiner_start == MODEL.default_refiner_start


def test_a_pass_may_have_a_schedule_of_its_own() -> None:
    regions = (Region("first_denoise"), Region("denoise", strength=0.5, steps=28))
    sampling = resolve(SamplingParams(num_inference_steps=12), MODEL)
    assert rounds_of(replace(HIRES, regions=regions), MODEL, sampling) == (12, 14)

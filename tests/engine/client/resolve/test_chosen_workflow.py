"""Which workflow of a user serves a request, by the model that names it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from fakes import MODEL
from run_workflows import CLASSES, GUARDED

from core.errors import InvalidRequestError
from core.graph.catalog import with_registered
from core.sampling_params import SamplingParams
from engine.client.resolve.chosen_workflow import chosen_workflow
from engine.client.resolve.sampling_defaults import resolve

GENERATING = replace(GUARDED, name="generating", inputs=(GUARDED.inputs[0], GUARDED.inputs[-1]))
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

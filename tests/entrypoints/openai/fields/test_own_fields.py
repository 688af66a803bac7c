"""Names of workflows' inputs among the fields of requests."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from api_calls import assert_refused
from fake_engine import FakeEngine
from run_workflows import DIAMOND, GUARDED, STAMP

from core.graph.form import INTEGER, NUMBER, TRUTH, Form, tensor, text
from core.graph.op import Port
from entrypoints.openai.body.submission import MAX_TEXT_BYTES
from entrypoints.openai.fields.own_fields import unfit_name


@pytest.mark.parametrize(
    ("name", "form", "is_fit"),
    [
        ("strictness", NUMBER, True),
        ("strength", NUMBER, True),  # the request's own, of one kind
        ("strength", TRUTH, False),
        ("n", INTEGER, True),
        ("lora", text(8), False),  # its values are no texts
        ("seed", tensor("int64", 1), False),
        ("stamp", STAMP, True),
        ("image", STAMP, False),
        ("images", text(8), False),
        ("model", text(8), False),
    ],
)
def test_an_input_of_a_models_workflow_is_no_other_field_of_requests(name: str, form: Form, is_fit: bool) -> None:
    workflow = replace(GUARDED, inputs=(*GUARDED.inputs[:-2], Port.of(name, form)))
    assert unfit_name(workflow)[0] == ("" if is_fit else name)


@pytest.mark.parametrize(("name", "is_fit"), [("image", True), ("stream", True), ("lora", True), ("model", False)])
def test_an_input_of_a_workflow_alone_may_be_called_as_any_other_field(name: str, is_fit: bool) -> None:
    workflow = replace(DIAMOND, inputs=(Port.of(name, tensor("float32", 16)),))
    assert unfit_name(workflow)[0] == ("" if is_fit else name)


async def test_a_text_that_has_the_name_of_another_workflows_file_is_as_short_as_any(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """While it comes, nobody knows which of the two it is for."""
    for name, form in (("words", text(4 * MAX_TEXT_BYTES)), ("numbers", tensor("float32", 16))):
        engine.workflows[name] = replace(DIAMOND, name=name, inputs=(Port.of("given", form),))
    fields = {"model": "words", "given": "x" * (MAX_TEXT_BYTES + 1)}
    answer = await client.post("/v1/images/edits", files=[(name, (None, value)) for name, value in fields.items()])
    assert_refused(answer, 400, "string_above_max_length", "given")

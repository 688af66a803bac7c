"""Names of workflows' inputs among the fields of requests."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest
from api_calls import assert_refused
from fake_engine import FakeEngine
from run_workflows import DIAMOND, GUARDED, STAMP

from core.graph.form import INTEGER, NUMBER, TRUTH, Form, tensor, text
from core.graph.op import Port
from entrypoints.openai.body.json_body import LONG_STRING_BYTES
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
        ("quality", text(8), False),  # of the request's own few words
        ("style", text(8), True),  # likewise, but to no effect
        ("frame_count", INTEGER, True),
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


@pytest.mark.parametrize("operation", ["generations", "edits"])
async def test_an_input_takes_the_place_of_a_field_without_effect(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """What its class alone reads is not ignored, either, though it says nothing to this model."""
    own = {"style": text(8), "frame_count": INTEGER, "negative_prompt": text(8)}
    workflow = replace(GUARDED, inputs=(*GUARDED.inputs[:-2], *(Port.of(name, form) for name, form in own.items())))
    monkeypatch.setattr(engine, "workflow_of", lambda model: workflow)
    inputs = {"style": "noir", "frame_count": 40, "negative_prompt": "fog"}
    body = {"prompt": "p", "moderation": "auto", "image": "data:image/png;base64,aGk=", **inputs}
    if operation == "generations":
        del body["image"]
    answer = await client.post(f"/v1/images/{operation}", json=body)
    assert answer.status_code == 200, answer.text
    assert engine.last.inputs == inputs
    assert answer.json()["stencil"]["ignored"] == ["moderation"]


async def test_a_long_text_comes_in_json_as_in_a_form(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strings above LONG_STRING_BYTES are kept apart while a body comes, and hardly any but pictures are so long."""
    ports = (Port.of("words", text(MAX_TEXT_BYTES)), Port.of("few", text(8)))
    workflow = replace(GUARDED, inputs=(*GUARDED.inputs[:-2], *(replace(port, is_optional=True) for port in ports)))
    monkeypatch.setattr(engine, "workflow_of", lambda model: workflow)
    for is_ascii, times in ((True, 40_000), (False, 70_000)):
        words = 'é😀"\\\n/' * times
        body = json.dumps({"prompt": "p", "words": words}, ensure_ascii=is_ascii)
        assert LONG_STRING_BYTES < len(body.encode()) - 100 < MAX_TEXT_BYTES
        answer = await client.post("/v1/images/generations", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        assert engine.last.inputs == {"words": words}
    for name, size, status in (("words", MAX_TEXT_BYTES, 413), ("few", LONG_STRING_BYTES + 1, 400)):
        answer = await client.post("/v1/images/generations", json={"prompt": "p", name: "x" * size})
        assert answer.status_code == status, answer.text
    assert "it has 524289 bytes, of at most 8" in answer.text


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

"""The field `lora`, and adapters among the models, over HTTP."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest
from api_calls import IMAGE, assert_refused, post_edit, post_json
from fake_engine import MODEL, FakeEngine

from core.lora import Lora
from core.patches import Patch

ADAPTERS = {
    name: msgspec.structs.replace(MODEL, name=name, parent=MODEL.name, patch=f"{name}'s") for name in ("shirt", "hat")
}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.models |= ADAPTERS
    return engine


async def generate(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
    return await post_json(client, {"prompt": "a hat"} | fields, "generations")


async def edit_json(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
    image = {"image_url": "data:image/png;base64,AAAA"}
    return await post_json(client, {"prompt": "a hat", "images": [image]} | fields)


async def test_forms_and_json_bodies_choose_an_adapter(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for response in (
        await post_edit(client, lora="shirt"),
        await edit_json(client, lora="shirt"),
        await generate(client, lora="shirt"),
        await post_edit(client, model="shirt"),
        await post_edit(client, model="tiny/fill", lora="shirt"),
    ):
        assert response.status_code == 200, response.text
        assert response.json()["stencil"]["ignored"] == []
        assert (engine.choice.model.name, engine.choice.loras) == (MODEL.name, (Lora("shirt"),))


async def test_no_adapter_is_the_model_itself(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for response in (await post_edit(client, lora=""), await edit_json(client, lora=None), await generate(client)):
        assert response.status_code == 200, response.text
        assert (engine.choice.model.name, engine.choice.loras) == (MODEL.name, ())


async def test_an_unknown_adapter_is_refused_with_those_there_are(client: httpx.AsyncClient) -> None:
    for response in (
        await post_edit(client, lora="dress"),
        await edit_json(client, lora="dress"),
        await generate(client, lora="dress"),
        await client.post("/v1/templates", files=[("lora", (None, "dress")), IMAGE]),
    ):
        message = assert_refused(response, 400, "invalid_value", "lora")
        assert message == "Invalid value: 'dress'. Supported values are: 'shirt', 'hat'."
    assert_refused(await post_edit(client, lora="x" * 513), 400, "string_above_max_length", "lora")


async def test_several_adapters_have_a_scale_each(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """As JSON, also in the text of a form."""
    both = [{"name": "shirt", "scale": 0.8}, "hat"]
    for response in (
        await edit_json(client, lora=both),
        await generate(client, lora=both),
        await post_edit(client, lora=json.dumps(both)),
    ):
        assert response.status_code == 200, response.text
        assert engine.choice.loras == (Lora("shirt", 0.8), Lora("hat"))
    for response in (
        await edit_json(client, lora={"name": "hat", "scale": -2}),
        await post_edit(client, lora='{"scale": -2, "name": "hat"}'),
        await edit_json(client, model="hat", lora=[{"name": "hat", "scale": -2}]),
    ):
        assert response.status_code == 200, response.text
        assert engine.choice.loras == (Lora("hat", -2.0),)
    template = await client.post("/v1/templates", files=[("lora", (None, json.dumps(both))), IMAGE])
    assert template.status_code == 200, template.text
    assert engine.primed_for == (Patch("hat's"), Patch("shirt's", 0.8))


@pytest.mark.parametrize(
    ("lora", "code", "words"),
    [
        (3, "invalid_type", 'expected a name, an object with "name" and "scale", or a list of these'),
        ([["shirt"]], "invalid_type", "but got list"),
        ({"name": 3}, "invalid_type", "'lora'"),
        ({"name": ""}, "empty_string", "'lora'"),
        ({"name": "hat", "scale": "0.5"}, "invalid_type", "'lora'"),
        ({"name": "hat", "scale": True}, "invalid_type", "'lora'"),
        ({"name": "hat", "scale": 101}, "decimal_above_max_value", "<= 100"),
        ({"scale": 1}, "invalid_value", "expected a name, an object"),
        (
            {"name": "hat", "path": "/etc/hat"},
            "invalid_value",
            "A file is loaded beforehand: --lora, POST /v1/load_lora_adapter",
        ),
        (["hat", "shirt", {"name": "hat"}], "invalid_value", "'hat' is named twice"),
        (["hat"] * 9, "array_above_max_length", "at most 8 adapters, but got 9"),
        ([{"name": "x" * 513}], "string_above_max_length", "512"),
        (["hat", "dress"], "invalid_value", "'dress'. Supported values are: 'shirt', 'hat'"),
    ],
)
async def test_what_is_no_adapter_is_refused_in_json_and_forms(
    client: httpx.AsyncClient, lora: object, code: str, words: str
) -> None:
    assert words in assert_refused(await edit_json(client, lora=lora), 400, code, "lora")
    if isinstance(lora, list | dict):
        assert words in assert_refused(await post_edit(client, lora=json.dumps(lora)), 400, code, "lora")


@pytest.mark.parametrize("name", ["lora[]", "lora[name]", "lora[0][name]"])
async def test_a_form_that_spreads_it_over_fields(client: httpx.AsyncClient, name: str) -> None:
    """As the openai client does with objects and arrays in `extra_body`."""
    message = assert_refused(await post_edit(client, **{name: "hat"}), 400, "invalid_value", "lora")
    assert "one text, a name or JSON" in message


async def test_a_form_with_half_a_list_or_too_long_a_one(client: httpx.AsyncClient) -> None:
    assert "truncated" in assert_refused(await post_edit(client, lora='["hat"'), 400, "invalid_value", "lora")
    long = json.dumps([" " * 70_000])
    assert_refused(await post_edit(client, lora=long), 400, "string_above_max_length", "lora")
    assert_refused(await edit_json(client, lora=["x" * 600_000]), 400, "string_above_max_length", "lora")
    huge = '{"name": "hat", "scale": ' + "9" * 5000 + "}"
    assert_refused(await post_edit(client, lora=huge), 400, "invalid_value", "lora")


async def test_a_server_without_adapters(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.models = {MODEL.name: MODEL}
    assert "GET /v1/models" in assert_refused(await post_edit(client, lora="shirt"), 400, "invalid_value", "lora")


async def test_a_template_of_an_adapter(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    template = (await client.post("/v1/templates", files=[("lora", (None, "hat")), IMAGE])).json()
    assert engine.templates.get(template["id"], "").model == MODEL.name
    assert engine.primed_for == (Patch("hat's"),)


async def test_models_are_listed_with_their_parents(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()["data"]
    parents = {model["id"]: model["parent"] for model in listed}
    assert parents == {MODEL.name: None, "shirt": MODEL.name, "hat": MODEL.name}
    assert (await client.get("/v1/models/hat")).json() == listed[-1]

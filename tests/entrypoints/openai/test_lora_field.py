"""The field `lora`, and adapters among the models, over HTTP."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from api_calls import IMAGE, assert_refused, post_edit, post_json
from fake_engine import MODEL, FakeEngine

from core.patches import Lora, Patch

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
        assert (engine.last.model, engine.last.loras) == (MODEL.name, (Lora("shirt"),))


async def test_no_adapter_is_the_model_itself(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for response in (await post_edit(client, lora=""), await edit_json(client, lora=None), await generate(client)):
        assert response.status_code == 200, response.text
        assert (engine.last.model, engine.last.loras) == (MODEL.name, ())


async def test_an_unknown_adapter_is_refused_with_those_there_are(client: httpx.AsyncClient) -> None:
    for response in (
        await post_edit(client, lora="dress"),
        await edit_json(client, lora="dress"),
        await generate(client, lora="dress"),
        await client.post("/v1/templates", files=[("lora", (None, "dress")), IMAGE]),
    ):
        message = assert_refused(response, 400, "invalid_value", "lora")
        assert message == "Invalid value: 'dress'. Supported values are: 'shirt', 'hat'."
    assert_refused(await edit_json(client, lora=["shirt"]), 400, "invalid_type", "lora")
    assert_refused(await post_edit(client, lora="x" * 513), 400, "string_above_max_length", "lora")


async def test_a_server_without_adapters(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.models = {MODEL.name: MODEL}
    assert "--lora" in assert_refused(await post_edit(client, lora="shirt"), 400, "invalid_value", "lora")


async def test_a_template_of_an_adapter(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    template = (await client.post("/v1/templates", files=[("lora", (None, "hat")), IMAGE])).json()
    assert engine.templates.get(template["id"], "").model == MODEL.name
    assert engine.primed_for == (Patch("hat's"),)


async def test_models_are_listed_with_their_parents(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()["data"]
    parents = {model["id"]: model["parent"] for model in listed}
    assert parents == {MODEL.name: None, "shirt": MODEL.name, "hat": MODEL.name}
    assert (await client.get("/v1/models/hat")).json() == listed[-1]

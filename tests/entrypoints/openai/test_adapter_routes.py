"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: off unless the operator allows them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from api_calls import assert_refused
from fake_engine import MODEL, FakeEngine

from entrypoints.openai.app import ServerSettings, create_app

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
HAT = {"lora_name": "hat", "lora_path": "/loras/hat.safetensors"}


def connect(engine: FakeEngine, *, runtime_lora: bool) -> httpx.AsyncClient:
    settings = ServerSettings(api_keys=(), max_upload_bytes=1000, runtime_lora=runtime_lora)
    app = create_app(engine, settings)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(engine, runtime_lora=True) as client:
        yield client


async def test_an_adapter_is_loaded_and_unloaded(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    loaded = await client.post(LOAD, json=HAT | {"lora_int_id": 1})
    assert loaded.json() == {"id": "hat", "object": "model", "parent": MODEL.name, "ignored": ["lora_int_id"]}
    assert engine.loaded == {"hat": ("/loras/hat.safetensors", "")}
    again = await client.post(LOAD, json=HAT | {"lora_name": "cap", "model": MODEL.name})
    assert again.status_code == 200
    assert engine.loaded["cap"] == ("/loras/hat.safetensors", MODEL.name)
    gone = await client.post(UNLOAD, json={"lora_name": "hat"})
    assert gone.json() == {"id": "hat", "object": "model", "deleted": True, "ignored": []}
    assert_refused(await client.post(UNLOAD, json={"lora_name": "hat"}), 404, "adapter_not_found", "lora_name")


async def test_an_adapter_may_be_loaded_in_the_background(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post(LOAD, json=HAT | {"wait": False})
    assert answer.json() == {"id": "hat", "object": "model", "parent": MODEL.name, "ignored": []}
    assert (engine.begun, engine.loaded) == (["hat"], {})
    assert_refused(await client.post(LOAD, json=HAT | {"wait": "no"}), 400, "invalid_type", "wait")
    await client.post(LOAD, json=HAT | {"wait": True})
    assert "hat" in engine.loaded


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "lora_name"),
        ({"lora_name": "hat"}, "missing_required_parameter", "lora_path"),
        ({"lora_name": "", "lora_path": "x"}, "missing_required_parameter", "lora_name"),
        ({"lora_name": 3, "lora_path": "x"}, "invalid_type", "lora_name"),
        ({"lora_name": "hat", "lora_path": ["x"]}, "invalid_type", "lora_path"),
    ],
)
async def test_bodies_are_checked(client: httpx.AsyncClient, body: dict[str, object], code: str, param: str) -> None:
    assert_refused(await client.post(LOAD, json=body), 400, code, param)


async def test_a_body_that_is_no_json(client: httpx.AsyncClient) -> None:
    assert (await client.post(LOAD, data=HAT)).status_code == 415
    answer = await client.post(LOAD, content=b"{", headers={"content-type": "application/json"})
    assert_refused(answer, 400, "invalid_json", None)


async def test_they_are_off_by_default(engine: FakeEngine) -> None:
    async with connect(engine, runtime_lora=False) as client:
        for route in (LOAD, UNLOAD):
            message = assert_refused(await client.post(route, json=HAT), 403, "adapter_loading_off", None)
            assert "--allow-runtime-lora" in message
    assert engine.loaded == {}

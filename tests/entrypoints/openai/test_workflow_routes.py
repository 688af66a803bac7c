"""POST /v1/workflows and DELETE /v1/workflows/{name}: off unless the operator allows them; then, a key opens them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from api_calls import assert_refused
from fake_engine import FakeEngine
from workflow_texts import SOUND

from engine.client.resolve.bound_model import BoundModel
from entrypoints.openai import workflow_routes
from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.workflows.registered import Registered

ROUTE, TEXT = "/v1/workflows", SOUND.replace("NAME", "twice")


def connect(engine: FakeEngine, *admin_keys: str, api_keys: tuple[str, ...] = ()) -> httpx.AsyncClient:
    settings = ServerSettings(api_keys=api_keys, max_upload_bytes=1000, admin_keys=admin_keys)
    app = create_app(engine, settings)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(engine, "admin", api_keys=("user",)) as client:
        yield client


ADMIN = {"authorization": "Bearer admin"}


async def test_a_file_is_registered_and_deleted(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post(ROUTE, content=TEXT, headers=ADMIN)
    assert answer.json() == {"object": "list", "data": [{"id": "twice", "object": "model"}]}
    assert list(engine.workflows) == ["twice"]
    gone = await client.delete(f"{ROUTE}/twice", headers=ADMIN)
    assert gone.json() == {"id": "twice", "object": "model", "deleted": True}
    assert_refused(await client.delete(f"{ROUTE}/twice", headers=ADMIN), 404, "model_not_found", "model")


async def test_a_file_may_begin_with_a_byte_order_mark(client: httpx.AsyncClient) -> None:
    answer = await client.post(ROUTE, content=TEXT.encode("utf-8-sig"), headers=ADMIN)
    assert [workflow["id"] for workflow in answer.json()["data"]] == ["twice"]


async def test_the_address_says_whose_pictures_are_made(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    address = f"{ROUTE}?model=tiny/fill&refiner=polish&second=other%20one"
    assert (await client.post(address, content=TEXT, headers=ADMIN)).status_code == 200
    assert engine.bound == BoundModel("tiny/fill", {"refiner": "polish", "second": "other one"})
    await client.post(ROUTE, content=TEXT, headers=ADMIN)
    assert engine.bound == BoundModel()
    for wrong in ("model=", "refiner=a&refiner=b"):
        answer = await client.post(f"{ROUTE}?{wrong}", content=TEXT, headers=ADMIN)
        assert_refused(answer, 400, "invalid_value", wrong.partition("=")[0])


@pytest.mark.parametrize("key", ["", "user", "other"])
async def test_no_other_key_opens_them(client: httpx.AsyncClient, engine: FakeEngine, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for answer in (
        await client.post(ROUTE, content=TEXT, headers=headers),
        await client.delete(f"{ROUTE}/twice", headers=headers),
    ):
        assert_refused(answer, 401, "invalid_api_key", None)
        assert answer.headers["www-authenticate"] == "Bearer"
    assert not engine.workflows
    assert (await client.get("/v1/models", headers=ADMIN)).status_code == 401, "and it opens nothing else"
    assert (await client.get("/v1/workflowsx")).status_code == 401


async def test_they_are_off_by_default(engine: FakeEngine) -> None:
    async with connect(engine) as client:
        for answer in (
            await client.post(ROUTE, content=TEXT, headers=ADMIN),
            await client.delete(f"{ROUTE}/twice", headers={"authorization": "Bearer "}),
        ):
            message = assert_refused(answer, 403, "runtime_workflows_off", None)
            assert "--allow-runtime-workflows" in message
            assert "--admin-key-file" in message
    assert not engine.workflows


async def test_defaults_that_no_request_would_follow_are_refused(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post(ROUTE, content=f"{TEXT}workflow.set_defaults(seed=1)\n", headers=ADMIN)
    assert "leave set_defaults out" in assert_refused(answer, 400, "invalid_workflow", None)
    assert not engine.workflows


async def test_files_are_imported_one_at_a_time(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are answered meanwhile."""
    running, most, gate = 0, 0, asyncio.Event()

    async def slowly(text: str) -> Registered:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        return Registered()

    monkeypatch.setattr(workflow_routes, "read_sent", slowly)
    posts = [asyncio.create_task(client.post(ROUTE, content=TEXT, headers=ADMIN)) for _ in range(3)]
    while not running:
        await asyncio.sleep(0)
    assert (await client.get("/health")).status_code == 200
    gate.set()
    assert {post.status_code for post in await asyncio.gather(*posts)} == {200}
    assert most == 1


async def test_a_server_that_is_not_ready_refuses(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_ready = False
    assert_refused(await client.post(ROUTE, content=TEXT, headers=ADMIN), 503, "server_is_overloaded", None)

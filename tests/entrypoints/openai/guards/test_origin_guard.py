"""OriginGuard: web pages of other hosts can change nothing on a server without keys; other clients are let through."""

from __future__ import annotations

import httpx
import pytest
from api_calls import IMAGE, assert_refused, post_edit
from fake_engine import FakeEngine

from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.openai.guards.origin_guard import is_same_host

FOREIGN = {"origin": "https://evil.example"}


async def test_a_page_of_another_host_changes_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    template_id = (await client.post("/v1/templates", files=[IMAGE])).json()["id"]
    client.headers.update(FOREIGN)
    for refused in (
        await post_edit(client),
        await client.post("/v1/templates", files=[IMAGE]),
        await client.delete(f"/v1/templates/{template_id}"),
    ):
        assert_refused(refused, 403, "foreign_origin", None)
    assert not engine.edits
    assert len(engine.templates) == 1


async def test_the_servers_own_pages_and_other_clients_are_let_through(client: httpx.AsyncClient) -> None:
    assert (await post_edit(client)).status_code == 200
    client.headers["origin"] = "http://test"
    assert (await post_edit(client)).status_code == 200


async def test_reading_requests_are_let_through(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models", headers=FOREIGN)).status_code == 200


async def test_a_key_is_enough(engine: FakeEngine) -> None:
    app = create_app(engine, ServerSettings(api_keys=("k",), max_upload_bytes=1000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=FOREIGN) as client:
        assert_refused(await post_edit(client), 401, "invalid_api_key", None)
        client.headers["authorization"] = "Bearer k"
        assert (await post_edit(client)).status_code == 200


ALLOWED = "https://app.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.mark.parametrize("api_keys", [(), ("k",)])
@pytest.mark.parametrize("allowed", [ALLOWED, "*"])
async def test_pages_of_an_allowed_origin_may_read_and_change(
    engine: FakeEngine, allowed: str, api_keys: tuple[str, ...]
) -> None:
    app = create_app(engine, ServerSettings(api_keys=api_keys, max_upload_bytes=1000, allowed_origins=(allowed,)))
    headers = {"origin": ALLOWED, "authorization": "Bearer k"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers) as client:
        may = await client.options("/v1/images/edits", headers=PREFLIGHT)
        assert may.status_code == 200
        assert {"POST", "DELETE"} <= set(may.headers["access-control-allow-methods"].split(", "))
        assert may.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        good, bad = await post_edit(client), await post_edit(client, n="11")
        assert (good.status_code, bad.status_code) == (200, 400)
        engine.entering = RuntimeError("a bug")
        failed = await post_edit(client)
        assert failed.status_code == 500
        for answer in (may, good, bad, failed, await client.get("/v1/models")):
            assert answer.headers["access-control-allow-origin"] == allowed
            assert "access-control-allow-credentials" not in answer.headers
        assert "x-request-id" in good.headers["access-control-expose-headers"]


async def test_pages_of_others_may_not(engine: FakeEngine) -> None:
    app = create_app(engine, ServerSettings(api_keys=(), max_upload_bytes=1000, allowed_origins=(ALLOWED,)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=FOREIGN) as client:
        assert (await client.options("/v1/images/edits", headers=PREFLIGHT)).status_code == 400
        refused = await post_edit(client)
        assert_refused(refused, 403, "foreign_origin", None)
        assert "access-control-allow-origin" not in refused.headers
    assert not engine.edits


@pytest.mark.parametrize(
    ("origin", "host", "is_same"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://LOCALHOST:8000", "localhost:8000", True),
        ("https://pictures.example", "pictures.example", True),
        ("https://pictures.example", "pictures.example:443", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:3000", "localhost:8000", False),
        ("http://127.0.0.1:8000", "localhost:8000", False),
        ("http://localhost:8000.evil.example", "localhost:8000", False),
        ("http://localhost:80", "localhost:8000", False),
        ("null", "null", False),
        ("", "", False),
        ("http://[::1", "[::1", False),
    ],
)
def test_origins_of_the_same_host_are_recognised(origin: str, host: str, is_same: bool) -> None:
    assert is_same_host(origin, host) is is_same

"""Web pages of other hosts change nothing on a server without keys; everybody else is let through."""

from __future__ import annotations

import httpx
import pytest
from api_calls import IMAGE, assert_refused, post_edit
from fake_engine import FakeEngine

from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.openai.origin_guard import is_same_host

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


async def test_the_servers_own_pages_and_other_clients_do(client: httpx.AsyncClient) -> None:
    assert (await post_edit(client)).status_code == 200
    client.headers["origin"] = "http://test"
    assert (await post_edit(client)).status_code == 200


async def test_reading_is_the_browsers_matter(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models", headers=FOREIGN)).status_code == 200


async def test_a_key_is_enough(engine: FakeEngine) -> None:
    app = create_app(engine, ServerSettings(api_keys=("k",), max_upload_bytes=1000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=FOREIGN) as client:
        assert_refused(await post_edit(client), 401, "invalid_api_key", None)
        client.headers["authorization"] = "Bearer k"
        assert (await post_edit(client)).status_code == 200


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
def test_what_is_the_same_host(origin: str, host: str, is_same: bool) -> None:
    assert is_same_host(origin, host) is is_same

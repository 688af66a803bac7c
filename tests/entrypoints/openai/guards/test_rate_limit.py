"""The rate limit over HTTP: what is counted, for which caller, and the headers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from api_calls import IMAGE, error_of, post_edit
from fake_engine import FakeEngine

from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.openai.guards.rate_limit import LIMITED

DOCS = Path(__file__).resolve().parents[4] / "docs"
COUNTED = {"x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"}


@asynccontextmanager
async def limited(
    engine: FakeEngine, limit: int, *keys: str, hosts: tuple[str, ...] = ("127.0.0.1",)
) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client for each of `hosts`, all of one server."""
    app = create_app(engine, ServerSettings(api_keys=keys, max_upload_bytes=1000, rate_limit=limit))
    transports = [httpx.ASGITransport(app, client=(host, 1)) for host in hosts]
    clients = [httpx.AsyncClient(transport=transport, base_url="http://test") for transport in transports]
    yield clients
    for client in clients:
        await client.aclose()


async def test_a_refusal(engine: FakeEngine) -> None:
    async with limited(engine, 2) as [client]:
        first, second, third = [await post_edit(client) for _ in range(3)]
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second, third)] == ["1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in (first, second, third)} == {"2"}
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    error = error_of(third)
    assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
    assert third.headers["retry-after"] == "30"
    assert "2 requests per minute" in error["message"]
    assert len(engine.edits) == 2
    assert b'request_rejects_total{reason="rate_limit"} 1.0' in engine.metrics.exposition()


async def test_loads_of_adapters_are_counted(engine: FakeEngine) -> None:
    """They have workers read files; unloading costs nothing."""
    async with limited(engine, 1) as [client]:
        answers = [await client.post("/v1/load_lora_adapter", json={}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [403, 429]
        assert (await client.post("/v1/unload_lora_adapter", json={})).status_code == 403


CALLED = {
    "/v1/images/edits": "edits",
    "/v1/images/generations": "generations",
    "/v1/images/masks": "masks",
    "/v1/templates": "templates",
    "/v1/load_lora_adapter": "adapter loads",
    "/prompt": "prompt",
    "/api/prompt": "prompt",
}


@pytest.mark.parametrize(
    ("page", "place"), [("flags.md", r"^\| `--rate-limit .*?$"), ("api.md", r"^`--rate-limit.*?\n$")]
)
def test_the_documentation_names_all_that_is_counted(page: str, place: str) -> None:
    assert CALLED.keys() == set(LIMITED)
    (text,) = re.findall(place, (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert [word for word in CALLED.values() if word not in " ".join(text.split())] == []


async def test_only_work_is_counted(engine: FakeEngine) -> None:
    async with limited(engine, 3) as [client]:
        template = await client.post("/v1/templates", files=[IMAGE])
        path = f"/v1/templates/{template.json()['id']}"
        for url in ("/v1/models", "/health", "/ready", "/metrics", "/v1/engine/stats", path, "/v1/images/edits"):
            assert not COUNTED & set((await client.get(url)).headers)
        assert (await client.delete(path)).status_code == 200
        assert (await client.post("/v1/images/generations", json={"prompt": "a"})).status_code == 200
        last = await post_edit(client)
        assert last.headers["x-ratelimit-remaining-requests"] == "0"
        for url in ("/v1/templates", "/v1/images/generations", "/v1/images/edits"):
            assert (await client.post(url)).status_code == 429
        assert (await client.get("/v1/models")).status_code == 200


async def test_keys_have_shares_of_their_own_and_wrong_ones_none(engine: FakeEngine) -> None:
    async with limited(engine, 1, "a", "b") as [client]:
        for key, status in (("no", 401), ("no", 401), ("a", 200), ("a", 429), ("b", 200), ("b", 429), ("no", 401)):
            client.headers["authorization"] = f"Bearer {key}"
            answer = await post_edit(client)
            assert answer.status_code == status
            assert COUNTED & set(answer.headers) == (set() if status == 401 else COUNTED)


@pytest.mark.parametrize(
    ("host", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("what:a proxy", "forwards", True),
    ],
)
async def test_addresses_without_keys(engine: FakeEngine, host: str, other: str, is_same: bool) -> None:
    async with limited(engine, 1, hosts=(host, other)) as [client, second]:
        assert (await post_edit(client)).status_code == 200
        assert (await post_edit(second)).status_code == (429 if is_same else 200)


async def test_the_openai_client_waits_for_retry_after(engine: FakeEngine) -> None:
    """After the burst one request per second passes: with its retries the client gets its answer."""
    async with limited(engine, 60, "k") as [client]:
        api = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=client, max_retries=0)
        for _ in range(60):
            await api.images.edit(image=b"i", prompt="a")
        with pytest.raises(openai.RateLimitError, match="Please try again in 1s"):
            await asyncio.gather(*[api.images.edit(image=b"i", prompt="a") for _ in range(10)])
        assert await api.with_options(max_retries=3).images.edit(image=b"i", prompt="a")

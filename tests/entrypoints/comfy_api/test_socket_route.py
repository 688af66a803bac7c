"""ComfyUI's websocket over real sockets: who may listen, and who is given up."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from comfy_graphs import txt2img
from fake_engine import MODEL, FakeEngine
from real_server import running, until
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from entrypoints import websocket_protocol
from entrypoints.comfy_api import socket_route
from entrypoints.comfy_api import sockets as sockets_module


def listening(address: tuple[str, int], client_id: str, **options: Any) -> connect:
    url = f"ws://{address[0]}:{address[1]}/ws?clientId={client_id}"
    return connect(url, proxy=None, ping_interval=None, max_size=None, **options)


async def refusal(attempt: connect) -> tuple[int, dict[str, str]]:
    with pytest.raises(InvalidStatus) as caught:
        await attempt
    return caught.value.response.status_code, dict(caught.value.response.headers)


async def test_each_client_has_one_connection_and_each_owner_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "MAX_SOCKETS_OF_OWNER", 1)
    key = {"additional_headers": {"Authorization": "Bearer one"}}
    other = {"additional_headers": {"Authorization": "Bearer two"}}
    async with running(FakeEngine(), ("one", "two"), comfy_api=True) as (server, address):
        assert (await refusal(listening(address, "a")))[0] == 401
        async with listening(address, "a", **key) as first, listening(address, "a", **other):
            told = json.loads(await first.recv())
            assert (told["type"], told["data"]["sid"]) == ("status", "a")
            await first.send(json.dumps({"type": "feature_flags", "data": {}}))
            assert json.loads(await first.recv())["type"] == "feature_flags"
            status, headers = await refusal(listening(address, "b", **key))
            assert (status, headers["retry-after"]) == (503, "10")
            assert (await refusal(listening(address, "x" * 65, **key)))[0] == 400
            async with listening(address, "a", **key) as second:
                await first.wait_closed()
                assert first.close_code == socket_route.TRY_AGAIN
                await second.recv()
        await until(lambda: not server.server_state.connections)


async def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_route, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(websocket_protocol, "CLOSE_SECONDS", 0.3)
    model = msgspec.structs.replace(MODEL, name="sd", has_guidance=True, is_guidance_cfg=True)
    graph = txt2img()
    graph["9"] = {"class_type": "SaveImageWebsocket", "inputs": {"images": ["8", 0]}}
    async with (
        running(FakeEngine(model, bytes(20_000_000)), comfy_api=True) as (server, address),
        listening(address, "slow") as slow,
        httpx.AsyncClient() as client,
    ):
        await slow.recv()
        slow.transport.pause_reading()
        url = f"http://{address[0]}:{address[1]}/prompt"
        answer = await client.post(url, json={"prompt": graph, "client_id": "slow"})
        assert answer.status_code == 200
        await client.aclose()
        await until(lambda: not server.server_state.connections)
        slow.transport.abort()

"""WebSocket connections over real sockets: of an application that echoes, behind the guards."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
from fake_engine import FakeEngine
from starlette.websockets import WebSocket, WebSocketDisconnect
from websocket_client import BINARY, CLOSE, PING, PONG, TEXT, WebSocketClient, masked

from entrypoints import serve, websocket_protocol
from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.websocket_frames import GOING_AWAY, MAX_MESSAGE_BYTES, NOT_UTF8, PROTOCOL_ERROR, TOO_LARGE
from entrypoints.websocket_protocol import accept_key

T = TypeVar("T")
Address = tuple[str, int]


@asynccontextmanager
async def echoing(gone: list[int] | None = None, **settings: object) -> AsyncIterator[Address]:
    """A server with a websocket that says what it hears. gone: gets the code of each connection that has ended."""
    made = ServerSettings(**{"api_keys": (), "max_upload_bytes": 1000, **settings})  # type: ignore[arg-type]
    app = create_app(FakeEngine(), made)  # type: ignore[arg-type]

    @app.websocket("/v1/echo")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            while True:
                message = await websocket.receive()
                websocket._raise_on_disconnect(message)
                if message.get("text") == "fail":
                    raise ValueError("it fails")
                await websocket.send({"type": "websocket.send", **{k: message.get(k) for k in ("text", "bytes")}})
        except WebSocketDisconnect as error:
            if gone is not None:
                gone.append(error.code)

    server = serve.http_server(app, has_websockets=True)
    with serve.bind("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await task


async def aside(work: Callable[[], T]) -> T:
    """Run a client beside the server."""
    return await asyncio.to_thread(work)


async def test_messages_go_both_ways() -> None:
    def talk(address: Address) -> None:
        with WebSocketClient(address, "/v1/echo") as client:
            assert client.status == 101
            for size in (1, 200, MAX_MESSAGE_BYTES):
                client.send(TEXT, b"x" * size)
                assert client.recv() == "x" * size
                client.send(BINARY, b"y" * size)
                assert client.recv() == b"y" * size
            client.send(PING, b"there?")
            assert client.frame() == (PONG, b"there?")
            client.send(CLOSE, struct.pack(">H", 1000))
            assert client.frame() == (CLOSE, struct.pack(">H", 1000))
            assert client.frame() == (CLOSE, b"")  # the end

    gone = list[int]()
    async with echoing(gone) as address:
        await aside(lambda: talk(address))
    assert gone == [1000]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (masked(TEXT, b"\xff"), NOT_UTF8),
        (masked(5, b""), PROTOCOL_ERROR),
        (masked(TEXT, b"x" * (MAX_MESSAGE_BYTES + 1)), TOO_LARGE),
    ],
)
async def test_a_client_that_breaks_the_protocol_is_told_and_left(data: bytes, code: int) -> None:
    def talk(address: Address) -> None:
        with WebSocketClient(address, "/v1/echo") as client:
            client.send_bytes(data)
            opcode, payload = client.frame()
            assert (opcode, struct.unpack(">H", payload[:2])[0]) == (CLOSE, code)

    gone = list[int]()
    async with echoing(gone) as address:
        await aside(lambda: talk(address))
    assert gone == [code]


async def test_a_client_that_vanishes_is_noticed() -> None:
    gone = list[int]()
    async with echoing(gone) as address:
        await aside(lambda: WebSocketClient(address, "/v1/echo").close())
        async with asyncio.timeout(10):
            while not gone:
                await asyncio.sleep(0.01)
    assert gone == [1006]


async def test_a_client_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_protocol, "PING_SECONDS", 0.2)

    def listen(address: Address) -> list[int]:
        with WebSocketClient(address, "/v1/echo") as client:
            opcodes = [client.frame()[0]]
            client.send(PONG, b"")
            opcodes += [client.frame()[0]]
            try:
                return [*opcodes, client.frame()[0]]  # nothing was said meanwhile
            except ConnectionResetError:
                return [*opcodes, CLOSE]

    async with echoing() as address:
        assert await aside(lambda: listen(address)) == [PING, PING, CLOSE]


async def test_the_end_of_the_server_is_told() -> None:
    clients = list[WebSocketClient]()
    async with echoing() as address:
        clients.append(await aside(lambda: WebSocketClient(address, "/v1/echo")))
        ending = asyncio.create_task(aside(clients[0].frame))
        await asyncio.sleep(0.05)
        closer = asyncio.create_task(_close_after(clients[0], ending))
    assert await closer == (CLOSE, struct.pack(">H", GOING_AWAY))


async def _close_after(client: WebSocketClient, ending: asyncio.Task[tuple[int, bytes]]) -> tuple[int, bytes]:
    told = await ending
    client.close()
    return told


async def test_a_failure_of_the_application_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    def talk(address: Address) -> tuple[int, bytes]:
        with WebSocketClient(address, "/v1/echo") as client:
            client.send(TEXT, b"fail")
            return client.frame()

    async with echoing() as address:
        assert await aside(lambda: talk(address)) == (CLOSE, struct.pack(">H", 1011))
    assert "it fails" in caplog.text


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        ({}, "Origin: http://evil.example\r\n", 403),
        ({"allowed_hosts": ("stencil.example",)}, "Host: evil.example\r\n", 403),
        ({"api_keys": ("key",)}, "", 401),
        ({"api_keys": ("key",)}, "Authorization: Bearer other\r\n", 401),
        ({"api_keys": ("key",)}, "Authorization: Bearer key\r\n", 101),
        ({"allowed_origins": ("http://good.example",)}, "Origin: http://good.example\r\n", 101),
    ],
)
async def test_guards_hold_for_websockets(settings: dict[str, object], headers: str, status: int) -> None:
    def connect(address: Address) -> None:
        with WebSocketClient(address, "/v1/echo", headers) as client:
            assert client.status == status
            assert client.headers["x-request-id" if status != 101 else "upgrade"]
            assert status == 101 or b'"error"' in client.body

    async with echoing(**settings) as address:
        await aside(lambda: connect(address))


async def test_another_path_is_refused() -> None:
    async with echoing() as address:
        client = await aside(lambda: WebSocketClient(address, "/v1/models"))
    assert client.status == 403
    client.close()


KEY = base64.b64encode(bytes(16))
OFFER = [(b"connection", b"keep-alive, Upgrade"), (b"upgrade", b"WebSocket"), (b"sec-websocket-version", b"13")]


def test_an_offer_is_whole() -> None:
    assert accept_key(b"GET", [*OFFER, (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ==")]) == (
        b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # RFC 6455, 1.3
    )
    whole = [*OFFER, (b"sec-websocket-key", KEY)]
    assert accept_key(b"POST", whole) is None
    for left_out in range(4):
        assert accept_key(b"GET", [each for place, each in enumerate(whole) if place != left_out]) is None
    assert accept_key(b"GET", [*OFFER, (b"sec-websocket-key", b"short")]) is None

"""WebSocket connections over real sockets: of an application that echoes, behind the guards."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from fake_engine import FakeEngine
from real_server import until
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode

from entrypoints import serve, websocket_protocol
from entrypoints.openai.app import ServerSettings, create_app
from entrypoints.websocket_protocol import MAX_FRAGMENTS, MAX_MESSAGE_BYTES, is_offer


class Echo:
    """A server with a websocket that says what it hears. gone: codes of the connections that have ended."""

    def __init__(self, **settings: Any) -> None:
        app = create_app(FakeEngine(), ServerSettings(**{"api_keys": (), "max_upload_bytes": 1000, **settings}))
        app.websocket("/v1/echo")(self._echo)
        self.server = serve.http_server(app, has_websockets=True)
        self.gone = list[int]()
        self.address = ("", 0)

    async def _echo(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            while True:
                message = await websocket.receive()
                websocket._raise_on_disconnect(message)
                if message.get("text") == "fail":
                    raise ValueError("it fails")
                if message.get("text") == "leave":
                    return
                await websocket.send({"type": "websocket.send", **{k: message.get(k) for k in ("text", "bytes")}})
        except WebSocketDisconnect as error:
            self.gone.append(error.code)

    def connect(self, path: str = "/v1/echo", host: str = "127.0.0.1", **options: Any) -> connect:
        url, (ip, port) = f"ws://{host}:{self.address[1]}{path}", self.address
        return connect(url, host=ip, port=port, proxy=None, ping_interval=None, max_size=None, **options)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Echo]:
        with serve.bind("127.0.0.1", 0) as listener:
            self.address = listener.getsockname()
            task = asyncio.create_task(self.server.serve(sockets=[listener]))
            try:
                yield self
            finally:
                self.server.should_exit = True
                await task


def echoing(**settings: Any) -> Any:
    return Echo(**settings).running()


OFFER = (
    b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
ACCEPTED = b"sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="  # RFC 6455, 1.3


def masked(opcode: Opcode, payload: bytes, *, fin: bool = True) -> bytes:
    return Frame(opcode, payload, fin).serialize(mask=True)


async def closed(client: ClientConnection) -> int:
    """The code with which the server closes the connection."""
    async with asyncio.timeout(10):
        await client.wait_closed()
    return client.close_code or 0


async def test_messages_go_both_ways() -> None:
    async with echoing() as echo, echo.connect() as client:
        assert client.response.headers.get("sec-websocket-extensions") is None  # pictures are compressed already
        for size in (1, 200, MAX_MESSAGE_BYTES):
            await client.send("x" * size)
            assert await client.recv() == "x" * size
            await client.send(b"y" * size)
            assert await client.recv() == b"y" * size
        await client.send(["in ", "parts"])
        assert await client.recv() == "in parts"
        await (await client.ping(b"there?"))
        await client.close()
        await until(lambda: bool(echo.gone))
        assert echo.gone == [1000]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (masked(Opcode.TEXT, b"\xff"), CloseCode.INVALID_DATA),
        (b"\x85\x80mask", CloseCode.PROTOCOL_ERROR),
        (masked(Opcode.TEXT, b"x" * (MAX_MESSAGE_BYTES + 1)), CloseCode.MESSAGE_TOO_BIG),
        (
            masked(Opcode.TEXT, b"", fin=False) + MAX_FRAGMENTS * masked(Opcode.CONT, b"", fin=False),
            CloseCode.MESSAGE_TOO_BIG,
        ),
    ],
    ids=["no text", "no opcode", "too large", "too many frames"],
)
async def test_a_client_that_breaks_the_protocol_is_told_and_left(data: bytes, code: int) -> None:
    async with echoing() as echo, echo.connect() as client:
        client.transport.write(data)
        assert await closed(client) == code
        await until(lambda: bool(echo.gone))
        assert echo.gone == [code]


async def test_a_client_that_vanishes_is_noticed() -> None:
    async with echoing() as echo, echo.connect() as client:
        client.transport.abort()
        await until(lambda: bool(echo.gone))


async def test_a_client_that_does_not_answer_pings_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PING_SECONDS", 0.2)
    async with echoing() as echo, echo.connect() as there:
        reader, writer = await asyncio.open_connection(*echo.address)
        writer.write(OFFER % b"/v1/echo")
        await until(lambda: bool(echo.gone))
        assert len(echo.gone) == 1
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        writer.close()
        await there.send("still here")
        assert await there.recv() == "still here"


async def test_answers_to_pings_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a client that reads nothing; it is left when it does not close, either."""
    monkeypatch.setattr(websocket_protocol, "CLOSE_SECONDS", 0.2)
    async with echoing() as echo:
        reader, writer = await asyncio.open_connection(*echo.address, limit=1000)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(OFFER % b"/v1/echo")
        assert ACCEPTED in (await reader.readuntil(b"\r\n\r\n")).lower()
        (protocol,) = echo.server.server_state.connections
        pings = masked(Opcode.PING, bytes(125)) * 8000
        while protocol.writable.is_set():
            writer.write(pings)
            await asyncio.sleep(0)
        waiting = protocol.transport.get_write_buffer_size()
        for _ in range(3):
            writer.write(pings)
            await writer.drain()
        await asyncio.sleep(0.1)
        assert protocol.transport.get_write_buffer_size() <= waiting + 2**18
        writer.write(masked(Opcode.TEXT, b"leave"))
        await until(lambda: not echo.server.server_state.connections)
        writer.close()


@pytest.mark.parametrize(("keys", "status"), [(("key",), b"401"), ((), b"101")])
async def test_nothing_is_answered_before_the_offer_is_accepted(keys: tuple[str, ...], status: bytes) -> None:
    async with echoing(api_keys=keys) as echo:
        reader, writer = await asyncio.open_connection(*echo.address)
        writer.write(OFFER % b"/v1/echo" + masked(Opcode.PING, b"early") + masked(Opcode.CLOSE, b""))
        async with asyncio.timeout(10):
            said = await reader.read()
        assert said.startswith(b"HTTP/1.1 %s " % status)
        assert (b"early" in said) == (not keys)
        writer.close()


async def test_the_end_of_the_server_is_told() -> None:
    async with AsyncExitStack() as stack:
        async with echoing() as echo:
            client = await stack.enter_async_context(echo.connect())
        assert await closed(client) == CloseCode.SERVICE_RESTART


async def test_a_failure_of_the_application_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with echoing() as echo, echo.connect() as client:
        await client.send("fail")
        assert await closed(client) == CloseCode.ABNORMAL_CLOSURE
    assert "it fails" in caplog.text


@pytest.mark.parametrize(
    ("settings", "options", "status"),
    [
        ({}, {"origin": "http://evil.example"}, 403),
        ({"allowed_hosts": ("stencil.example",)}, {"host": "evil.example"}, 403),
        ({"api_keys": ("key",)}, {}, 401),
        ({"api_keys": ("key",)}, {"additional_headers": {"Authorization": "Bearer other"}}, 401),
        ({"api_keys": ("key",)}, {"additional_headers": {"Authorization": "Bearer key"}}, 101),
        ({"allowed_origins": ("http://good.example",)}, {"origin": "http://good.example"}, 101),
        ({"allowed_hosts": ("stencil.example",)}, {"host": "stencil.example"}, 101),
    ],
)
async def test_guards_hold_for_websockets(settings: dict[str, Any], options: dict[str, Any], status: int) -> None:
    async with echoing(**settings) as echo:
        if status == 101:
            async with echo.connect(**options) as client:
                assert client.response.status_code == 101
            return
        with pytest.raises(InvalidStatus) as caught:
            await echo.connect(**options)
        answer = caught.value.response
        assert answer.status_code == status
        assert answer.headers["x-request-id"]
        assert b'"error"' in (answer.body or b"")


async def test_another_path_is_refused() -> None:
    async with echoing() as echo:
        with pytest.raises(InvalidStatus) as caught:
            await echo.connect("/v1/models")
        assert caught.value.response.status_code == 403


async def test_no_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("uvicorn.error", "websockets.server"):
        caplog.set_level(logging.DEBUG, name)
    options = {"additional_headers": {"Authorization": "Bearer key-of-mine"}, "logger": logging.Logger("client")}
    async with echoing(api_keys=("key-of-mine",)) as echo, echo.connect(**options):
        pass
    assert "key-of-mine" not in caplog.text


def test_an_offer_is_whole() -> None:
    whole = OFFER % b"/ws"
    assert is_offer(whole)
    lines = whole.split(b"\r\n")
    for left_out in range(2, 6):
        assert not is_offer(b"\r\n".join([line for place, line in enumerate(lines) if place != left_out]))
    assert not is_offer(whole.replace(b"GET", b"POST"))
    assert not is_offer(whole.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert not is_offer(whole.replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"short"))
    assert not is_offer(whole.replace(b"/ws", b"/\xff"))
    assert not is_offer(whole.replace(b"Host: ", b"X: " + bytes(10_000)))

"""Clients that do not read, over real sockets: they lose their place, and do not delay shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
from fake_engine import FakeEngine
from real_server import running, until

from core.errors import ConfigError
from core.ipc.logs import TextFormatter
from entrypoints import serve
from entrypoints.openai.answer import edit_response

REQUEST = (
    b"POST /v1/images/edits HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    b"content-length: %d\r\n\r\n%s"
)
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\np\r\n'
    b'--b\r\nContent-Disposition: form-data; name="stream"\r\n\r\n%s\r\n'
    b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\nbytes\r\n--b--\r\n'
)


@pytest.fixture
def engine() -> FakeEngine:
    """An engine whose pictures are larger than all buffers between server and client."""
    return FakeEngine(payload=bytes(30_000_000))


async def ask_and_never_read(address: tuple[str, int], stream: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, address)
    form = FORM % stream
    await loop.sock_sendall(client, REQUEST % (len(form), form))
    return client


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_client_that_does_not_read_is_given_up(
    engine: FakeEngine, stream: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(TextFormatter())
    monkeypatch.setattr(edit_response, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(serve, "STALL_SECONDS", 0.5)
    async with running(engine) as (server, address):
        with await ask_and_never_read(address, stream):
            await until(lambda: engine.num_open == 1)
            await until(lambda: engine.num_open == 0)
            await until(lambda: not server.server_state.connections)
    assert "a client that does not read its answer" in caplog.text
    assert "status=499" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_client_that_does_not_read_causes_no_traceback_at_shutdown(
    engine: FakeEngine, stream: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(engine) as (server, address):
        server.config.timeout_graceful_shutdown = 1
        with await ask_and_never_read(address, stream):
            await until(lambda: engine.num_open == 1)
            await asyncio.sleep(0.1)
            server.should_exit = True
            await until(lambda: engine.num_open == 0)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_body_interrupted_by_shutdown_is_answered(engine: FakeEngine) -> None:
    async with running(engine) as (server, address):
        server.config.timeout_graceful_shutdown = 1
        reader, writer = await asyncio.open_connection(*address)
        writer.write(REQUEST[:-2] % 1000)
        await asyncio.sleep(0.2)
        server.should_exit = True
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in head


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "no.such.host.invalid"])
def test_an_invalid_host_is_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*; choose another --host") as refusal:
        serve.bind(host, 0)
    assert "None" not in str(refusal.value)

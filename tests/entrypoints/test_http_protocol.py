"""Limits on connections, over real sockets: endless heads, and connections that send nothing or too little."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
from fake_engine import FakeEngine
from real_server import running, until

from entrypoints import http_protocol
from entrypoints.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS
from entrypoints.openai.body import chunks

ENDLESS_HEADS = {
    "a line": [b"GET /", b"a" * 60_000],
    "a header": [b"GET /health HTTP/1.1\r\nhost: a\r\nx: ", b"a" * 60_000],
    "headers": [b"GET /health HTTP/1.1\r\nhost: a\r\n", b"x: a\r\n" * 10_000],
    "blank lines": [b"\r\n", b"\r\n" * 30_000],
    "trailers": [
        b"POST /v1/images/edits HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n",
        b"x: a\r\n" * 10_000,
    ],
    "a trailer": [
        b"POST /v1/images/edits HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: ",
        b"a" * 60_000,
    ],
}
HALF_REQUESTS = {
    "nothing": b"",
    "half a line": b"GET /hea",
    "half a header": b"GET /health HTTP/1.1\r\nho",
    "no end": b"GET /health HTTP/1.1\r\nhost: a\r\n",
}
GOOD = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


async def talk(address: tuple[str, int], *pieces: bytes) -> bytes:
    """Send the pieces; returns everything that the server sends before it closes the connection, even if pieces are
    left.
    """
    reader, writer = await asyncio.open_connection(*address)
    answer = asyncio.ensure_future(read_all(reader))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
    except ConnectionError:  # it has closed already
        pass
    async with asyncio.timeout(20):
        said = await answer
    writer.close()
    return said


async def read_all(reader: asyncio.StreamReader) -> bytes:
    said = b""
    try:
        while piece := await reader.read(65536):
            said += piece
    except ConnectionError:
        pass
    return said


def error_code(answer: bytes) -> str:
    code: str = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
    return code


@pytest.mark.parametrize("kind", ENDLESS_HEADS)
async def test_a_head_without_end_is_refused_and_takes_no_memory(kind: str) -> None:
    begin, more = ENDLESS_HEADS[kind]
    async with running(FakeEngine()) as (server, address):
        answer = await talk(address, begin, *[more] * 40)
        assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")), answer[:200]
        await until(lambda: not server.server_state.connections)
        assert (await ask(address)).startswith(b"HTTP/1.1 200 ")


async def ask(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(GOOD)
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return head


async def test_the_refusal_of_a_large_head_has_the_envelope() -> None:
    async with running(FakeEngine()) as (_, address):
        answer = await talk(address, b"GET /health HTTP/1.1\r\nx: ", b"a" * MAX_HEAD_BYTES, b"a")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert error_code(answer) == "request_head_too_large"


async def test_many_small_headers_are_refused_even_when_they_come_at_once() -> None:
    head = b"POST /v1/images/edits HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n" + b"x: a\r\n" * MAX_HEADERS
    async with running(FakeEngine()) as (_, address):
        answer = await talk(address, head + b"\r\nabc" + GOOD)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert error_code(answer) == "request_head_too_large"


async def test_the_refusal_of_invalid_http_has_the_envelope() -> None:
    async with running(FakeEngine()) as (_, address):
        answer = await talk(address, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_code(answer) == "invalid_http"


async def test_a_large_head_within_the_limit_is_served() -> None:
    request = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: %s\r\n\r\n" % (b"a" * (MAX_HEAD_BYTES // 2))
    async with running(FakeEngine()) as (_, address):
        assert (await talk(address, request)).startswith(b"HTTP/1.1 200 ")


OFFERS = {
    "HTTP/2, as Java's client offers it": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n",
    "a WebSocket": b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "and no further request": b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n",
}
GENERATION = b'{"prompt": "it is whole", "n": 2}'
HEAD = b"POST /v1/images/generations HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
LAST = GOOD[:-2] + b"connection: close\r\n\r\n"


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("framing", ["at once", "in pieces", "chunked"])
async def test_a_client_that_offers_another_protocol_is_answered_in_http_1_1(offer: str, framing: str) -> None:
    head, body = HEAD + OFFERS[offer] + b"content-length: %d\r\n\r\n" % len(GENERATION), GENERATION
    if framing == "chunked":
        head, body = HEAD + OFFERS[offer] + b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n0\r\n\r\n"
        body %= (len(GENERATION), GENERATION)
    pieces = [head[:30], head[30:-1], head[-1:], body[:3], body[3:]] if framing == "in pieces" else [head + body]
    engine = FakeEngine()
    async with running(engine) as (_, address):
        answer = await talk(address, *pieces, LAST)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]
    assert answer.count(b"HTTP/1.1 200 ") == (1 if b"close" in OFFERS[offer] else 2)
    assert (engine.last.prompt, engine.last.sampling.n) == ("it is whole", 2)


async def test_any_number_of_such_offers_may_come_at_once() -> None:
    offer = GOOD[:-2] + OFFERS["a WebSocket"] + b"\r\n"
    async with running(FakeEngine()) as (_, address):
        answer = await talk(address, offer * 2000, LAST)
    assert answer.count(b"HTTP/1.1 200 ") == 2001


async def test_no_tunnel_is_opened() -> None:
    async with running(FakeEngine()) as (_, address):
        answer = await talk(address, b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_code(answer) == "invalid_http"


@pytest.mark.parametrize("kind", HALF_REQUESTS)
async def test_a_connection_with_half_a_head_is_closed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)
    async with running(FakeEngine()) as (server, address):
        started = time.monotonic()
        assert await talk(address, HALF_REQUESTS[kind]) == b""
        assert time.monotonic() - started >= 0.29
        await until(lambda: not server.server_state.connections)


async def test_a_connection_whose_second_head_arrives_too_slowly_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)
    async with running(FakeEngine()) as (server, address):
        answer = await talk(address, GOOD, *[b"\r\n"] * 5, *[bytes([byte]) for byte in GOOD[:-2]], *[b"x"] * 40)
        assert answer.count(b"HTTP/1.1 200 ") == 1
        await until(lambda: not server.server_state.connections)


async def test_an_idle_connection_and_one_that_waits_for_its_answer_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(http_protocol, "REST_SECONDS", 0.2)
    engine = FakeEngine()
    engine.gate.clear()
    body = b'{"prompt": "p"}'
    request = (
        b"POST /v1/images/generations HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    )
    async with running(engine) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request % len(body) + b"\r\n")
        await asyncio.sleep(0.5)  # a body has other limits
        writer.write(body)
        await until(lambda: engine.num_open == 1)
        await asyncio.sleep(0.5)
        engine.gate.set()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.5)
        writer.write(GOOD)
        await reader.readuntil(b"HTTP/1.1 200 ")
        writer.close()


async def test_the_rest_of_a_refused_body_is_read_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "REST_SECONDS", 0.3)
    request = b"POST /v1/images/edits HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    async with running(FakeEngine(), api_keys=("k",)) as (server, address):
        answer = await talk(address, request, *[b"4\r\nbody\r\n"] * 60)
        assert answer.startswith(b"HTTP/1.1 401 ")
        await until(lambda: not server.server_state.connections)


async def test_an_answer_that_comes_after_the_connection_was_refused_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    request = HEAD + b"content-length: %d\r\n\r\n" % len(GENERATION) + GENERATION
    async with running(engine) as (server, address):
        answer = asyncio.ensure_future(talk(address, request, b"\x16\x03\x01 this is no HTTP"))
        await until(lambda: engine.num_open == 1)
        assert error_code(await answer) == "invalid_http"
        engine.gate.set()
        await until(lambda: not server.server_state.tasks)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


REFUSED = {
    "before its body": (
        b"POST /v1/images/edits HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 20000000\r\n\r\n",
        401,
    ),
    "in its head": (b"GET /health HTTP/1.1\r\n" + b"x: a\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
    "as no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "after which more follows": (b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", 401),
}


@pytest.mark.parametrize("when", REFUSED)
async def test_a_client_that_reads_only_after_sending_everything_gets_its_answer(when: str) -> None:
    """A socket that is closed while it has unread input is reset, which would destroy the answer."""
    head, status = REFUSED[when]

    def send_then_read(address: tuple[str, int]) -> bytes:
        said = b""
        with socket.create_connection(address, timeout=20) as client:
            client.sendall(head)
            time.sleep(0.1)  # the answer and the end of the connection are on their way
            client.sendall(bytes(20_000_000))
            while piece := client.recv(65536):
                said += piece
        return said

    async with running(FakeEngine(), api_keys=("k",)) as (server, address):
        answer = await asyncio.to_thread(send_then_read, address)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        await until(lambda: not server.server_state.connections)


async def test_a_client_that_never_stops_sending_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "REST_SECONDS", 0.3)
    async with running(FakeEngine(), api_keys=("k",)) as (server, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(REFUSED["before its body"][0])
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")  # up to the end, which does not wait for the body
        while server.server_state.connections:
            writer.write(b"body")
            await asyncio.sleep(0.01)
        writer.close()


async def test_a_connection_whose_body_arrives_too_slowly_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However regularly its bytes arrive."""
    monkeypatch.setattr(chunks, "STALL_SECONDS", 0.5)
    request = (
        b"POST /v1/images/edits HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        b"content-length: 10000\r\n\r\n--b\r\n"
    )
    engine = FakeEngine()
    async with running(engine) as (server, address):
        answer = await talk(address, request, *[b"C"] * 200)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert error_code(answer) == "request_timeout"
        await until(lambda: not server.server_state.connections)


@pytest.mark.parametrize("is_reset", [False, True])
async def test_clients_that_disconnect_within_a_body_free_their_slots(is_reset: bool) -> None:
    engine = FakeEngine()  # of 4 places
    head = (
        b"POST /v1/images/edits HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        b'content-length: 10000\r\n\r\n--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\nhalf'
    )
    async with running(engine) as (server, address):
        for _ in range(3):
            clients = [socket.create_connection(address) for _ in range(4)]
            for client in clients:
                client.sendall(head)
            await until(lambda: len(server.server_state.tasks) == 4)
            for client in clients:
                if is_reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.close()
            await until(lambda: not server.server_state.connections and not server.server_state.tasks)
    assert engine.edits == []

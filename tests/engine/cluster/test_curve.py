"""Who gets an answer from a socket between machines: one client, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from engine.cluster.curve import CurveKeys, connect, listening

SERVER, CLIENT = CurveKeys.new(), CurveKeys.new()


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    """Of a socket that sends back what comes."""

    async def echo(socket: Any) -> None:
        while True:
            await socket.send_multipart(await socket.recv_multipart())

    with listening("127.0.0.1", SERVER, CLIENT.public) as (socket, port):
        task = asyncio.create_task(echo(socket))
        yield port
        task.cancel()


async def answer(socket: Any, seconds: float) -> bytes | None:
    with socket:
        await socket.send(b"hello")
        try:
            return bytes(await asyncio.wait_for(socket.recv(), seconds))
        except TimeoutError:
            return None


async def test_the_client_is_answered(port: int) -> None:
    with zmq.asyncio.Context() as context:
        socket = connect(context, f"tcp://127.0.0.1:{port}", CLIENT, SERVER.public, b"0")
        assert await answer(socket, 5) == b"hello"


@pytest.mark.parametrize("who", ["another client", "who expects another server", "who knows no key"])
async def test_nobody_else_is(port: int, who: str) -> None:
    with zmq.asyncio.Context() as context:
        address = f"tcp://127.0.0.1:{port}"
        match who:
            case "another client":
                socket = connect(context, address, CurveKeys.new(), SERVER.public, b"0")
            case "who expects another server":
                socket = connect(context, address, CLIENT, CurveKeys.new().public, b"0")
            case _:
                socket = context.socket(zmq.DEALER)
                socket.linger = 0
                socket.connect(address)
        assert await answer(socket, 0.3) is None


async def test_a_plain_connection_is_told_nothing(port: int) -> None:
    """What ZeroMQ says before it knows who is there is the same at every port of it, at most 64 bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    told = b""
    with suppress(ConnectionResetError):
        while part := await asyncio.wait_for(reader.read(), 10):
            told += part
    assert len(told) <= 64
    writer.close()

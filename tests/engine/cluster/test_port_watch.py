"""Whether a process at the other end of a connection is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from engine.cluster.port_watch import until_gone


class Far:
    """What listens at a port, and takes what comes until a connection is to break."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.is_ending = False  # it leaves its port once something has come there
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._take, "127.0.0.1")
        return int(self.server.sockets[0].getsockname()[1])

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.came.set()
        if self.is_ending:
            self.server.close()
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass

    def cut(self) -> None:
        self.came.clear()
        while self._writers:
            self._writers.pop().transport.abort()


@pytest_asyncio.fixture
async def watched() -> AsyncIterator[tuple[Far, asyncio.Task[None]]]:
    """What is connected to, and the watch of it."""
    far = Far()
    port = await far.start()
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 200)
        watch = asyncio.create_task(until_gone(socket, "127.0.0.1", port))
        await asyncio.sleep(0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        await asyncio.wait_for(far.came.wait(), 20)
        yield far, watch
        watch.cancel()
        await asyncio.wait([watch])
    far.cut()
    far.server.close()


async def test_a_process_that_leaves_its_port_is_gone(watched: tuple[Far, asyncio.Task[None]]) -> None:
    far, watch = watched
    far.server.close()
    far.cut()
    await asyncio.wait_for(watch, 20)


async def test_one_that_leaves_its_port_after_its_connections_is_gone(watched: tuple[Far, asyncio.Task[None]]) -> None:
    far, watch = watched
    far.is_ending = True
    far.cut()
    await asyncio.wait_for(watch, 20)


async def test_one_whose_connections_break_is_not(watched: tuple[Far, asyncio.Task[None]]) -> None:
    far, watch = watched
    for _ in range(3):
        far.cut()
        await asyncio.wait_for(far.came.wait(), 20)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(watch), 0.1)

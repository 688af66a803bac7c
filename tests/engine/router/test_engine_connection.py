"""An engine's connection to its server: it leaves no file behind, and ends an engine that cannot be read."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import closing
from pathlib import Path

import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.ipc.shared_array import Arena
from core.messages.engine import Failed, Output
from engine.engine_core.engine_process import connect
from engine.router.engine_client import EngineClient
from engine.router.local_backend import LocalBackend


async def test_the_sockets_folder_is_gone_once_the_engine_has_connected(tmp_path: Path) -> None:
    folder = os.path.join(tmp_path, "engine")
    os.mkdir(folder)
    address = f"ipc://{folder}/socket"
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as theirs, context.socket(zmq.DEALER) as ours:
        connecting = asyncio.create_task(connect(theirs, address))
        await asyncio.sleep(0.1)
        assert os.listdir(tmp_path) == ["engine"], "the engine has not connected yet"
        ours.bind(address)
        await asyncio.wait_for(connecting, 20)
        assert os.listdir(tmp_path) == []
        await theirs.send(b"up")
        assert await asyncio.wait_for(ours.recv(), 20) == b"up"
        await ours.send(b"down")
        assert await asyncio.wait_for(theirs.recv(), 20) == b"down"


async def test_an_engine_whose_message_cannot_be_read_is_killed_and_its_requests_fail() -> None:
    """The engine is a real process; the bytes reach its client's socket as if they were its own."""
    heard: list[Output] = []
    with closing(Arena.create(0, 1 << 12)) as arena, zmq.asyncio.Context() as context:
        client = EngineClient(
            EngineConfig(), LocalBackend(arena), lambda *ready: None, lambda *report: None, start_seconds=60.0
        )
        client.start()
        running = asyncio.create_task(client.run())
        client._waiters["r"] = heard.append
        with context.socket(zmq.DEALER) as socket:
            socket.connect(client._socket.getsockopt_string(zmq.LAST_ENDPOINT))
            await socket.send(b"nonsense")
            error = await asyncio.wait_for(client.failed(), 60)
        await running
        await client.close()
    assert "out of order and was killed: a message cannot be decoded" in str(error)
    (output,) = heard
    assert isinstance(output, Failed)
    assert output.failure.kind == "engine_dead"


class Unplaced:
    """Starts one engine, which is this one, for which no machine has room yet."""

    placed: float | None = None

    def __init__(self) -> None:
        self._killed = asyncio.Event()

    def start(self, config: EngineConfig, epoch: int, socket: zmq.asyncio.Socket) -> Unplaced:
        return self

    async def wait(self) -> object:
        return await self._killed.wait()

    async def stop(self, grace: float) -> object:
        return await self.wait()

    def kill(self) -> None:
        self._killed.set()

    def describe_exit(self) -> str:
        return "it was ended"

    def close(self) -> None:
        pass


async def test_the_time_limit_of_a_start_counts_from_when_there_is_room() -> None:
    engine = Unplaced()
    client = EngineClient(EngineConfig(), engine, lambda *ready: None, lambda *report: None, start_seconds=0.05)
    client.start()
    running = asyncio.create_task(client.run())
    await asyncio.sleep(0.2)
    assert client.error is None
    engine.placed = time.monotonic()
    error = await asyncio.wait_for(client.failed(), 20)
    assert "did not serve within 0.05 s" in str(error)
    assert time.monotonic() - engine.placed >= 0.05
    await running
    await client.close()

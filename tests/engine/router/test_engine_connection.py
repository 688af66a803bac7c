"""An engine's connection to its server: it leaves no file behind, and loses no report."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.costs.load_report import EngineStats, LoadReport, Queued, RequestLoad
from core.errors import EngineDeadError, MessageError
from core.ipc.shared_array import Arena
from core.messages.codec import encode
from core.messages.engine import EngineOutputs
from engine.engine_core.engine_process import connect
from engine.router.engine_client import EngineClient


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


async def test_the_readable_report_of_an_unreadable_message_counts() -> None:
    """A report is a change to the last one, and none of it is repeated."""
    load = LoadReport(num_received=1, num_running=0, num_waiting=1, queue=(Queued("a", RequestLoad(4, 0.1, 0.0), 5.0),))
    members = msgspec.msgpack.decode(encode(EngineOutputs(outputs=(), load=load)))
    payload = msgspec.msgpack.encode(members | {"outputs": [{"type": "Unknown"}]})
    reports: list[tuple[LoadReport, EngineStats | None]] = []
    arena = Arena.create(0, 1 << 12)
    client = EngineClient(
        EngineConfig(), arena, lambda *ready: None, lambda *report: reports.append(report), start_seconds=1.0
    )
    client._handle_unreadable(payload, MessageError("unknown output"))
    client.fail(EngineDeadError("it is gone"))
    client._handle_unreadable(payload, MessageError("unknown output"))
    await client.close()
    arena.close()
    assert reports == [(load, None)], "an engine that is gone holds nothing"

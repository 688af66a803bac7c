"""An engine's connection to its server leaves no file behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import zmq
import zmq.asyncio

from engine.engine_core.engine_process import connect


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

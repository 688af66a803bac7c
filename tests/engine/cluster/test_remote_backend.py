"""What is told of an engine of another machine that ends."""

from __future__ import annotations

from contextlib import closing

import pytest
import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.ipc.shared_array import Arena
from engine.cluster import remote_backend
from engine.cluster.curve import CurveKeys
from engine.cluster.host_config import HostAddress, HostConfig
from engine.cluster.remote_backend import RemoteBackend


class LostHost:
    """A host of which can be said no more how it ends."""

    placed = 0.0

    async def start(self, config: HostConfig) -> HostAddress:
        return HostAddress("127.0.0.1", 1, CurveKeys.new().public)

    async def wait(self) -> str:
        raise ConnectionError("Ray has forgotten it")

    async def end(self) -> None:
        pass


async def test_why_an_engine_ended_is_told_whatever_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that one of several tasks has failed."""
    monkeypatch.setattr(remote_backend, "APART_SECONDS", 0.0)
    with closing(Arena.create(0, 4096)) as arena, zmq.asyncio.Context() as context:
        backend = RemoteBackend(arena, lambda config: LostHost())
        with context.socket(zmq.DEALER) as socket:
            engine = backend.start(EngineConfig(), 7, socket)
            await engine.wait()
            await backend.close()
    assert engine.describe_exit() == "Ray has forgotten it"

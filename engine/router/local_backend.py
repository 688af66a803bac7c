"""LocalBackend: starts engines as child processes of the API server, whose arena they map."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.errors import ConfigError
from core.ipc.process import ChildProcess, spawn
from core.ipc.shared_array import Arena
from engine.engine_core.engine_process import EngineProcessConfig

ENTRY = "engine.engine_core.engine_process:main"
"""What an engine's process runs, see `spawn`."""


class LocalEngine:
    """An engine's process, see StartedEngine. Its workers end with it."""

    def __init__(self, process: ChildProcess, folder: Path) -> None:
        """folder: with the socket; the process removes it when it has connected."""
        self.placed = time.monotonic()
        self.link = None
        self._process = process
        self._folder = folder

    async def wait(self) -> int:
        """Wait until it has ended; its exit code."""
        return await self._process.wait()

    async def stop(self, grace: float) -> int:
        """End it within grace + 8 s; its exit code. Raises EngineError if it cannot be ended."""
        return await self._process.stop(grace)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._process.kill()

    def describe_exit(self) -> str:
        """See StartedEngine."""
        return f"the engine process died ({self._process.describe_exit()})"

    def close(self) -> None:
        """Remove the socket's folder, if the process has not."""
        shutil.rmtree(self._folder, ignore_errors=True)


class LocalBackend:
    """See EngineBackend. arena: of all handles in requests."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def start(self, config: EngineConfig, epoch: int, socket: zmq.asyncio.Socket) -> LocalEngine:
        """Spawn an engine's process; the socket's folder can be entered by this user alone. Raises ConfigError."""
        folder = tempfile.mkdtemp(prefix="stencil-")  # mode 0700
        try:
            address = _bind(socket, folder)
            process = spawn(
                ENTRY,
                msgspec.msgpack.encode(EngineProcessConfig(config, address, epoch, self._arena.id)),
                [self._arena.fd],
                f"stencil-engine-{config.data_parallel_rank}",
                remove=[folder],
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return LocalEngine(process, Path(folder))

    async def close(self) -> None:
        """There is nothing to let go of."""


def _bind(socket: zmq.asyncio.Socket, folder: str) -> str:
    address = f"ipc://{folder}/engine"
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot make a socket at {address}: {error}; set TMPDIR to a shorter path") from error
    return address

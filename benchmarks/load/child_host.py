"""ChildHost: an EngineHost in a child process, as on another machine: nothing is shared but TCP connections over
loopback. What Ray places is measured without Ray, which takes a share of the cores.
"""

from __future__ import annotations

import os

import msgspec
import uvloop

from core.config import EngineConfig
from core.ipc.process import SpawnedProcess, readable, spawn
from engine.cluster.engine_host import EngineHost
from engine.cluster.host_config import HostAddress, HostConfig
from engine.router import local_backend


class _ChildConfig(msgspec.Struct, frozen=True):
    host: HostConfig
    entry: str  # see `local_backend.ENTRY`


def main(config: bytes, fds: list[int]) -> None:
    """Entry point of the process."""
    settings = msgspec.msgpack.decode(config, type=_ChildConfig)
    local_backend.ENTRY = settings.entry

    async def run() -> None:
        def tell(address: HostAddress) -> None:
            os.write(fds[0], msgspec.msgpack.encode(address))
            os.close(fds[0])

        await EngineHost(settings.host).run(tell)

    uvloop.run(run())


class ChildHost:
    """See `engine.cluster.remote_backend.Host`."""

    placed = 0.0

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.process: SpawnedProcess | None = None

    async def start(self, config: HostConfig) -> HostAddress:
        """See Host. Its engine runs what those of this process would run."""
        engine = msgspec.structs.replace(config.engine, keeper="", launcher="", local_size=1)
        config = msgspec.structs.replace(config, engine=engine, address="127.0.0.1")
        ours, theirs = os.pipe()
        try:
            name = f"stencil-host-{self.config.data_parallel_rank}"
            encoded = msgspec.msgpack.encode(_ChildConfig(config, local_backend.ENTRY))
            self.process = spawn(f"{__name__}:main", encoded, [theirs], name)
            os.close(theirs)
            await readable(ours)
            return msgspec.msgpack.decode(os.read(ours, 4096), type=HostAddress)
        finally:
            os.close(ours)

    async def wait(self) -> str:
        """See Host."""
        assert self.process is not None
        await self.process.wait()
        return self.process.describe_exit()

    async def end(self) -> None:
        """See Host."""
        if self.process is not None:
            self.process.kill()
            await self.process.wait()

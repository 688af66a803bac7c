"""Engines in processes of their own, as on another machine: nothing is shared but a TCP connection over loopback. Their
hosts are forked, each with a launcher of its own, see `forked_server.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import pytest
import uvloop
from forked_processes import fork_child
from forked_server import have_own_launcher, warm_process

from core.config import EngineConfig
from core.ipc.process import ChildProcess, readable
from core.ipc.shared_array import Arena
from engine.client import services
from engine.cluster.engine_host import EngineHost
from engine.cluster.host_config import HostAddress, HostConfig
from engine.cluster.remote_backend import RemoteBackend

RECORDED_BYTES = 1 << 16


def main(config: bytes, fds: list[int]) -> None:
    """Entry point of a host's process."""
    have_own_launcher()
    settings = msgspec.msgpack.decode(config, type=HostConfig)

    async def run() -> None:
        def tell(address: HostAddress) -> None:
            os.write(fds[0], msgspec.msgpack.encode(address))
            os.close(fds[0])

        await EngineHost(settings).run(tell)

    uvloop.run(run())


@dataclass
class Connection:
    """One that a relay passes on. sent: the first bytes to the host, RECORDED_BYTES at most. last: what was last."""

    to_host: asyncio.StreamWriter
    sent: bytearray = field(default_factory=bytearray)
    last: bytes = b""


class Relay:
    """A TCP connection to a host that can be broken, and is recorded. port: of the host. connections: all there were,
    in the order in which they came."""

    def __init__(self) -> None:
        self.port = 0
        self.connections: list[Connection] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, port: int) -> int:
        """Pass on to this port; the port to connect to."""

        async def pass_on(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection | None = None
        ) -> None:
            self._writers.add(writer)
            with suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    if connection is not None:
                        connection.sent += data[: RECORDED_BYTES - len(connection.sent)]
                        connection.last = data
                    writer.write(data)
                    await writer.drain()
            writer.close()
            self._writers.discard(writer)

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)  # before the way on is there, or `close` would miss it
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:  # the host has ended
                return writer.close()
            self.connections.append(Connection(far_writer))
            await asyncio.gather(pass_on(reader, far_writer, self.connections[-1]), pass_on(far_reader, writer))

        self.port = port
        self._server = await asyncio.start_server(connect, "127.0.0.1")
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Break all connections, and lose what is under way."""
        for writer in self._writers:
            writer.transport.abort()

    def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()


class ProcessHost:
    """A Host that is a child of this process."""

    placed = 0.0

    def __init__(self, config: EngineConfig, hosts: list[ProcessHost]) -> None:
        self.process: ChildProcess | None = None
        self.config = config
        self.epoch, self.key = 0, b""  # once it listens
        self.relay = Relay()
        self.is_cut_off = False  # nothing that is asked of its machine arrives there
        hosts.append(self)

    async def start(self, config: HostConfig) -> HostAddress:
        engine = msgspec.structs.replace(config.engine, keeper="", launcher="", local_size=1)
        config = msgspec.structs.replace(config, engine=engine, address="127.0.0.1")
        ours, theirs = os.pipe()
        try:
            name = f"stencil-host-{self.config.data_parallel_rank}"
            order = msgspec.msgpack.encode(config)
            self.process = fork_child(warm_process().address, "remote_hosts:main", order, [theirs], name)
            os.close(theirs)
            await readable(ours)
            address = msgspec.msgpack.decode(os.read(ours, 4096), type=HostAddress)
        finally:
            os.close(ours)
        self.epoch, self.key = config.epoch, address.key
        return msgspec.structs.replace(address, port=await self.relay.start(address.port))

    async def wait(self) -> str:
        assert self.process is not None
        await self.process.wait()
        return f"the engine's host died ({self.process.describe_exit()})"

    async def end(self) -> None:
        self.relay.close()
        if self.process is not None and not self.is_cut_off:
            self.process.kill()
            await self.process.wait()


@contextmanager
def remote_engines() -> Iterator[list[ProcessHost]]:
    """An AsyncEngine that is started meanwhile has its engines on "other machines"; their hosts, in the order in which
    they start."""
    hosts: list[ProcessHost] = []

    def backend(config: EngineConfig, arena: Arena) -> RemoteBackend:
        return RemoteBackend(arena, lambda engine: ProcessHost(engine, hosts))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "_backend", backend)
        yield hosts

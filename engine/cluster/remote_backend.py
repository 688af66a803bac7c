"""RemoteBackend: starts engines on other machines, for an API server that speaks to them as to its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.errors import MessageError, StencilError, first_error
from core.ipc.heap import keep_freed_blocks
from core.ipc.logs import of_request
from core.ipc.shared_array import Arena
from engine.cluster.connection import KEPT_BYTES, LINKS, MESSAGES
from engine.cluster.courier import Ends
from engine.cluster.curve import IO_THREADS, CurveKeys, connect
from engine.cluster.host_config import HostAddress, HostConfig
from engine.cluster.link import Frames
from engine.cluster.port_watch import until_gone
from engine.cluster.server_courier import ServerCourier
from engine.router.engine_backend import MachineLink

logger = logging.getLogger("stencil.router")

SILENT_SHARE = 0.75
"""Of `hang_seconds`: a machine without a word for so long has stopped, or cannot be reached. Less than 1, since the
engine's own silence then says the same later."""

END_SECONDS = 5.0
"""How long the end of a host may take to be asked for."""

APART_SECONDS = 0.1
"""Between connecting two links. ZeroMQ gives a connection to the IO thread that has fewest: those that come at once
would share one at both ends, which encrypts at most 0.3 to 0.6 GB/s.
"""

REASON_SECONDS = 0.2
"""How long a host that is seen to be gone may take to be told of, with the reason, by what has started it."""

ROOM_TIMES = 2
"""Address space for arrays on the other machine, in times of this one's: they are freed there a moment later, and leave
other gaps."""

_NEAR = "inproc://engine"
"""Address within the context of an engine's client."""


class Host(Protocol):
    """A process on another machine that runs an EngineHost."""

    @property
    def placed(self) -> float | None:
        """As of a StartedEngine."""

    async def start(self, config: HostConfig) -> HostAddress:
        """Have it started, and wait until it listens. Raises StencilError."""

    async def wait(self) -> str:
        """Wait until it has ended; why, as of a StartedEngine."""

    async def end(self) -> None:
        """End it, in whatever state it is, also while it starts; what cannot be reached ends by itself. Raises
        nothing."""


class RemoteEngine:
    """See StartedEngine. It is gone once nothing of it is heard any more: from then on it cannot touch a request's
    memory, even if its machine is only cut off.
    """

    def __init__(
        self,
        config: EngineConfig,
        epoch: int,
        keys: CurveKeys,
        host: Host,
        arena: Arena,
        near: zmq.asyncio.Socket,
        ending: set[asyncio.Task[None]],
    ) -> None:
        """near: connected to the engine's client. ending: takes the end of the host, which nobody waits for."""
        self._config = HostConfig(config, ROOM_TIMES * arena.size, epoch, keys.public)
        self._keys = keys
        self._host = host
        self._arena = arena
        self._near = near
        self._ending = ending
        self._why = ""
        self._address = ""  # of its machine, once its host has started
        self._heard = 0.0  # when anything came from there last, seconds of CLOCK_MONOTONIC
        self._courier: ServerCourier | None = None  # None: it is of no machine yet
        self._killed = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="remote-engine")

    @property
    def placed(self) -> float | None:
        """See StartedEngine."""
        return self._host.placed

    @property
    def link(self) -> MachineLink | None:
        """See StartedEngine."""
        if self._courier is None:
            return None
        return MachineLink(self._address, time.monotonic() - self._heard, self._courier.byte_seconds)

    async def wait(self) -> object:
        """See StartedEngine."""
        return await asyncio.wait([self._task])

    async def stop(self, grace: float) -> object:
        """See StartedEngine."""
        await asyncio.wait([self._task], timeout=grace)
        self.kill()
        return await self.wait()

    def kill(self) -> None:
        """See StartedEngine."""
        self._end("the engine was ended")

    def describe_exit(self) -> str:
        """See StartedEngine."""
        return self._why or "running"

    def close(self) -> None:
        """See StartedEngine: nothing is left."""

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._killed.set()

    async def _run(self) -> None:
        """Start the host, serve until it has ended, and have it ended."""
        serving = asyncio.create_task(self._serve())
        killed = asyncio.create_task(self._killed.wait())
        try:
            await asyncio.wait([serving, killed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (serving, killed):
                task.cancel()
            await asyncio.wait([serving, killed])
            if not serving.cancelled() and (failed := serving.exception()) is not None:
                error = first_error(failed)
                self._end(str(error) or type(error).__name__)
                bugs = failed.split(StencilError)[1] if isinstance(failed, BaseExceptionGroup) else failed
                if bugs is not None and not isinstance(bugs, StencilError):
                    logger.error("an engine of another machine has failed", exc_info=bugs, extra=of_request(""))
            self._near.close()
            end = asyncio.create_task(self._end_host(), name="end-host")
            self._ending.add(end)
            end.add_done_callback(self._ending.discard)

    async def _end_host(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._host.end()

    async def _serve(self) -> None:
        address = await self._host.start(self._config)
        self._address, self._heard = address.address, time.monotonic()
        with zmq.asyncio.Context(IO_THREADS) as context:
            where = f"tcp://{address.address}:{address.port}"
            links: dict[bytes, zmq.asyncio.Socket] = {}
            try:
                for name in LINKS:
                    links[name] = connect(context, where, self._keys, address.key, name)
                    await asyncio.sleep(APART_SECONDS)
                await self._pass_messages(links, address)
            finally:
                for socket in links.values():
                    socket.close()

    async def _pass_messages(self, links: dict[bytes, zmq.asyncio.Socket], address: HostAddress) -> None:
        def transmit(link: bytes, frames: Frames) -> None:
            links[link].send_multipart(frames, zmq.NOBLOCK, copy=False)

        def to_client(payload: bytes) -> None:
            self._near.send(payload, zmq.NOBLOCK)

        seconds = SILENT_SHARE * self._config.engine.hang_seconds
        silent = f"the engine's machine, {address.address}, gave no sign of life in {seconds:g} s"
        ends = Ends(self._arena, transmit, to_client, lambda: self._end(silent), seconds)
        self._courier = courier = ServerCourier(self._config.epoch, ends)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._receive(name, socket, courier)) for name, socket in links.items()]
            running += [tasks.create_task(courier.run()), tasks.create_task(self._pass_on(courier))]
            told = tasks.create_task(self._host.wait())
            gone = tasks.create_task(until_gone(links[MESSAGES], address.address, address.port))
            await asyncio.wait([told, gone], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([told], timeout=REASON_SECONDS)
            self._end(told.result() if told.done() else f"the engine's host on {address.address} has died")
            for task in (*running, told, gone):
                task.cancel()

    async def _receive(self, name: bytes, socket: zmq.asyncio.Socket, courier: ServerCourier) -> None:
        while True:
            frames = await socket.recv_multipart(copy=False)
            self._heard = time.monotonic()
            try:
                courier.receive(name, [frame.buffer for frame in frames])
            except MessageError as error:  # outputs are lost, so it cannot go on
                return self._end(f"the engine's host is out of order: {error}")
            await asyncio.sleep(0)  # messages that are there already would let nothing else run

    async def _pass_on(self, courier: ServerCourier) -> None:
        while True:
            courier.send(await self._near.recv())


class RemoteBackend:
    """See EngineBackend. arena: of all handles in requests. new_host: makes what runs an engine elsewhere."""

    def __init__(self, arena: Arena, new_host: Callable[[EngineConfig], Host]) -> None:
        keep_freed_blocks(KEPT_BYTES)
        self._arena = arena
        self._new_host = new_host
        self._ending: set[asyncio.Task[None]] = set()  # hosts

    def start(self, config: EngineConfig, epoch: int, socket: zmq.asyncio.Socket) -> RemoteEngine:
        """See EngineBackend. The engine's client speaks to this process, which passes messages on."""
        near: zmq.asyncio.Socket = socket.context.socket(zmq.DEALER)
        try:
            near.setsockopt(zmq.LINGER, 0)
            near.set_hwm(0)
            socket.bind(_NEAR)
            near.connect(_NEAR)
            host = self._new_host(config)
            return RemoteEngine(config, epoch, CurveKeys.new(), host, self._arena, near, self._ending)
        except BaseException:
            near.close()  # the context would wait for it
            raise

    async def close(self) -> None:
        """Wait until all hosts have been ended."""
        if self._ending:
            await asyncio.wait(self._ending)

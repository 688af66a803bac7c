"""EngineHost: an engine with its workers, on this machine, for an API server on another one.

It stands where the API server stands on a single machine: it starts the engine, its launcher of workers and its keeper
of weights in the same way, and owns the arena that the engine maps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.errors import MessageError, OutOfMemoryError
from core.ipc.heap import keep_freed_blocks
from core.ipc.shared_array import Arena
from engine.client.processes.keeper_process import KeeperProcess, needs_keeper
from engine.client.processes.worker_launcher import needs_launcher, worker_launcher
from engine.cluster.connection import KEPT_BYTES
from engine.cluster.courier import Ends
from engine.cluster.curve import CurveKeys, listening
from engine.cluster.host_config import HostAddress, HostConfig
from engine.cluster.host_courier import HostCourier
from engine.cluster.link import Frames
from engine.router.engine_backend import StartedEngine
from engine.router.local_backend import LocalBackend

SILENT_TIMES = 2.0
"""Times `hang_seconds`: without a word of the API server for so long, a host ends. It is gone, or has given this engine
up."""

LAST_WORDS_SECONDS = 0.1
"""How long an engine's socket is read after its exit, for its last messages."""

FLUSH_SECONDS = 2.0
"""How long a host that ends waits for the API server to have its last messages."""


class EngineHost:
    """`run` once."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._end = asyncio.Event()
        self._why = ""

    async def run(self, on_listening: Callable[[HostAddress], None]) -> str:
        """Serve until the engine has ended, or the API server is gone; why, as of a StartedEngine. on_listening: called
        when the API server can connect. Raises ConfigError.
        """
        config, keys = self._config, CurveKeys.new()
        keep_freed_blocks(KEPT_BYTES)
        async with AsyncExitStack() as stack:
            arena = stack.enter_context(closing(Arena.create(0, config.arena_bytes)))
            far, port = stack.enter_context(listening(config.address, keys, config.client))
            engine_config = await self._with_helpers(stack)
            context = stack.enter_context(zmq.asyncio.Context())
            near = stack.enter_context(context.socket(zmq.DEALER))
            near.setsockopt(zmq.LINGER, 0)
            near.set_hwm(0)

            def transmit(link: bytes, frames: Frames) -> None:
                far.send_multipart([link, *frames], zmq.NOBLOCK, copy=False)

            def to_engine(payload: bytes) -> None:
                sent = near.send(payload, zmq.NOBLOCK)
                asyncio.ensure_future(sent).add_done_callback(_note_sent)

            seconds = SILENT_TIMES * config.engine.hang_seconds
            silent = f"the API server gave no sign of life in {seconds:g} s"
            ends = Ends(arena, transmit, to_engine, lambda: self.end(silent), seconds)
            courier = HostCourier(config.epoch, config.address, ends)
            engine = LocalBackend(arena).start(engine_config, config.epoch, near)
            stack.push_async_callback(_end, engine)
            on_listening(HostAddress(config.address, port, keys.public))
            return await self._serve(courier, engine, far, near)

    def end(self, why: str) -> None:
        """Have the host end, with its engine."""
        self._why = self._why or why
        self._end.set()

    async def _with_helpers(self, stack: AsyncExitStack) -> EngineConfig:
        """The engine's configuration, with the launcher and the keeper of this machine, which end with the stack."""
        engine = self._config.engine
        launcher, keeper = "", None
        if needs_launcher(engine):
            launcher = stack.enter_context(worker_launcher.used())
        if needs_keeper(engine):
            keeper = KeeperProcess()
            stack.push_async_callback(keeper.close)
            keeper.start()
            task = asyncio.create_task(keeper.run())
            stack.callback(task.cancel)
        return msgspec.structs.replace(engine, launcher=launcher, keeper="" if keeper is None else keeper.address)

    async def _serve(
        self, courier: HostCourier, engine: StartedEngine, far: zmq.asyncio.Socket, near: zmq.asyncio.Socket
    ) -> str:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(courier.run()),
                tasks.create_task(self._receive(far, courier)),
                tasks.create_task(self._pass_on(near, courier)),
                tasks.create_task(self._watch(engine)),
            ]
            await self._end.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    while not courier.is_flushed:
                        await asyncio.sleep(0.02)
            for task in running:
                task.cancel()
        return self._why

    async def _watch(self, engine: StartedEngine) -> None:
        await engine.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        self.end(engine.describe_exit())

    async def _receive(self, far: zmq.asyncio.Socket, courier: HostCourier) -> None:
        while True:
            link, *frames = await far.recv_multipart(copy=False)
            try:
                courier.receive(link.bytes, [frame.buffer for frame in frames])
            except MessageError as error:
                return self.end(f"the API server is out of order: {error}")
            except OutOfMemoryError as error:
                return self.end(str(error))
            await asyncio.sleep(0)  # messages that are there already would let nothing else run

    async def _pass_on(self, near: zmq.asyncio.Socket, courier: HostCourier) -> None:
        while True:
            courier.send(await near.recv())


def _note_sent(sent: asyncio.Future[Any]) -> None:
    """Take a send's error, which the event loop would log: the engine is gone, as `EngineHost._watch` sees."""
    if not sent.cancelled():
        sent.exception()


async def _end(engine: StartedEngine) -> None:
    engine.kill()
    await engine.wait()
    engine.close()

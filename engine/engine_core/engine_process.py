"""The engine process, which runs an EngineCore: its entry point, its socket to the API server, its workers and signals.

Started by EngineClient through core.ipc.process; exits when drained, when a worker keeps dying, or with its parent.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import shutil
import signal
import time
import traceback
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.errors import MessageError, StencilError, first_error
from core.failure import Failure
from core.graph.catalog import with_registered
from core.handles import PAGE_ARENA, VALUE_ARENA
from core.ipc.logs import of_request
from core.ipc.process import die_with_parent
from core.ipc.shared_array import Arena, ArenaFd
from core.messages.codec import MessageDecoder, failure_of, read_member
from core.messages.engine import EngineAlive, EngineFailed, EngineReady, FromEngine, ToEngine, moved
from core.messages.envelope import Envelopes
from core.messages.worker import CostSample
from core.scheduling.scheduler import StepScheduler
from core.scheduling.values.values import VALUE_BYTES
from engine.engine_core.engine_core import EngineCore, RefusedRequest
from engine.observability.engine_trace import EngineTrace
from engine.observability.tracing import create_tracer
from model_executor.executor import Executor

logger = logging.getLogger("stencil.engine")

LINGER_MS = 2000
"""How long the last messages may take to reach the parent at exit."""

MAX_BEAT_SECONDS = 1.0
"""Longest interval between EngineAlive messages; an eighth of `hang_seconds` if that is shorter."""


class EngineProcessConfig(msgspec.Struct, frozen=True):
    """Start parameters of an engine process. It inherits one file descriptor, the arena's."""

    engine: EngineConfig
    address: str  # the ZeroMQ endpoint to connect to
    epoch: int  # of this incarnation, see `core.messages.envelope`
    arena_id: int


def main(config: bytes, fds: list[int]) -> None:
    """Entry point of the process."""
    # A terminal or supervisor signals the whole process group; the parent leads the shutdown, and sends Drain.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = msgspec.msgpack.decode(config, type=EngineProcessConfig)
    engine = settings.engine
    with closing(create_tracer(engine.otlp_traces_endpoint, f"engine-{engine.data_parallel_rank}")) as tracer:
        workflows = with_registered(engine.workflows, {each.name for each in engine.classes})
        uvloop.run(_serve(settings, fds[0], EngineTrace(tracer, workflows)))


async def _serve(settings: EngineProcessConfig, arena_fd: int, trace: EngineTrace) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.set_hwm(0)
        await connect(socket, settings.address)
        die_with_parent()  # not earlier: its SIGKILL would keep the lifeline's thread from removing the socket's folder
        with closing(Link(socket, settings.epoch, settings.engine.hang_seconds)) as link:
            await _run_workers(settings, arena_fd, link, trace)


async def connect(socket: zmq.asyncio.Socket, address: str) -> None:
    """Connect, wait until the connection is established, and remove the socket's file with its folder, so that they
    are not left behind if a process is killed later.
    """
    with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
        socket.connect(address)
        await monitor.recv_multipart()
        socket.disable_monitor()
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


async def _run_workers(settings: EngineProcessConfig, arena_fd: int, link: Link, trace: EngineTrace) -> None:
    """Run the workers and the EngineCore until it ends; a failure is reported as EngineFailed."""
    try:
        pictures = ArenaFd(settings.arena_id, arena_fd)
        with closing(_page_arena(settings.engine)) as pages, closing(Arena.create(VALUE_ARENA, VALUE_BYTES)) as values:
            async with Executor(settings.engine, pictures, pages.handle, values.handle) as executor:
                await _run_engine(settings.engine, executor, link, trace)
    except StencilError as error:
        link.emit(EngineFailed(failure=Failure.of(error)))
    except BaseExceptionGroup as group:
        # The actor's edge: any error becomes a message, and through it a failure of every waiting request.
        logger.error("engine failed\n%s", traceback.format_exc())
        link.emit(EngineFailed(failure=Failure.of(first_error(group))))


def _page_arena(config: EngineConfig) -> Arena:
    """The host tier's memory; physical memory is taken only when pages are written."""
    return Arena.create(PAGE_ARENA, max(1, -(-config.cache.host_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE)


async def _run_engine(config: EngineConfig, executor: Executor, link: Link, trace: EngineTrace) -> None:
    models = await executor.ready()
    page_bytes = executor.device_page_bytes
    scheduler = StepScheduler(
        config.scheduler,
        models,
        config.workers_per_engine,
        cache=config.cache,
        device_page_bytes=page_bytes,
        sizes=executor.sizes,
        classes=config.classes,
        workflows=config.workflows,
    )
    scheduler.learn(executor.cost_samples, executor.components.items(), executor.ports)
    _tell_of_missing_profile(config, executor.cost_samples)
    core = EngineCore(scheduler, executor, link.emit, trace, config.hang_seconds)
    gc.collect()
    gc.freeze()  # so that collections do not walk what stays, such as modules
    link.emit(EngineReady(models=tuple(models.values()), device_page_bytes=min(filter(None, page_bytes), default=0)))
    async with asyncio.TaskGroup() as tasks:
        feeders = [tasks.create_task(link.feed(core)), tasks.create_task(_feed_results(executor, core))]
        await core.run()
        for feeder in feeders:
            feeder.cancel()


def _tell_of_missing_profile(config: EngineConfig, samples: Iterable[CostSample]) -> None:
    may_share = config.scheduler.max_degree > 1 == config.scheduler.degree
    if may_share and config.workers_per_engine > 1 and all(sample.degree == 1 for sample in samples):
        logger.info(
            "every request makes its steps on one worker, since no step was measured on several: make a profile with "
            "--degrees (docs/parallelism.md)"
        )


async def _feed_results(executor: Executor, core: EngineCore) -> None:
    async for message in executor.results():
        core.mailbox.put_nowait(message)


def _check_sent(sent: asyncio.Future[Any]) -> None:
    """Raise a send's error, which the event loop logs; without a high-water mark it means that the socket is broken."""
    if not sent.cancelled():
        sent.result()


class Link:
    """The engine's end of the socket to its EngineClient. Sends EngineAlive regularly until it is closed. The engine's
    age counts from here."""

    def __init__(self, socket: zmq.asyncio.Socket, epoch: int, hang_seconds: float) -> None:
        self._socket = socket
        self._envelopes = Envelopes(epoch)
        self._birth = time.monotonic()
        self._decoder: MessageDecoder[ToEngine] = MessageDecoder(ToEngine)
        self._beat(min(MAX_BEAT_SECONDS, hang_seconds / 8))

    def _beat(self, seconds: float) -> None:
        self.emit(EngineAlive())
        self._next_beat = asyncio.get_running_loop().call_later(seconds, self._beat, seconds)

    def close(self) -> None:
        """Send no more EngineAlive; messages already queued are still sent."""
        self._next_beat.cancel()

    def emit(self, message: FromEngine) -> None:
        """Queue a message; never blocks, as the socket has no high-water mark."""
        payload = self._envelopes.seal(moved(message, -self._birth), age=time.monotonic() - self._birth)
        sent = self._socket.send(payload, zmq.NOBLOCK)
        asyncio.ensure_future(sent).add_done_callback(_check_sent)

    async def feed(self, core: EngineCore) -> None:
        """Pass messages on to the core. A request that cannot be decoded is refused; others go on. Raises MessageError
        if messages are missing."""
        while True:
            opened = self._envelopes.open(await self._socket.recv())
            if opened is None:
                continue
            try:
                message: ToEngine | RefusedRequest = moved(self._decoder.decode(opened.body), self._birth)
            except MessageError as error:
                request_id = read_member(opened.body, "request_id", str)
                logger.error("%s", error, extra=of_request(request_id or ""))
                if request_id is None:
                    continue
                message = RefusedRequest(request_id, failure_of(error))
            core.mailbox.put_nowait(message)

"""EngineClient: the API server's connection to one incarnation of an engine. Has it started, sends requests, delivers
its outputs.

Owns the map request id -> waiter. When the engine or one of its workers dies, every waiter gets a Failed output.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.costs.load_report import EngineStats, LoadReport
from core.errors import ConfigError, EngineDeadError, MessageError, StencilError
from core.failure import Failure
from core.ipc.logs import of_request
from core.messages.codec import MessageDecoder
from core.messages.engine import (
    Abort,
    AdaptersUsed,
    Drain,
    DropTemplate,
    EngineAlive,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    Failed,
    FromEngine,
    Output,
    PartialImage,
    PrimeTemplate,
    ToEngine,
    UseAdapters,
    moved,
)
from core.messages.engine_birth import EngineBirth
from core.messages.envelope import Envelopes
from core.messages.worker import Addition, Removal
from core.model_info import ModelInfo
from engine.engine_core.watchdog import SilenceWatch
from engine.router.engine_backend import EngineBackend, MachineLink, StartedEngine

logger = logging.getLogger("stencil.engine")

STOP_SECONDS = 5.0
"""How long an engine may take to exit once it has nothing left to do, before it is killed."""

LAST_WORDS_SECONDS = 0.1
"""How long the socket is read after the engine's exit, for its last messages."""

Waiter = Callable[[Output], None]
"""Called in the event loop with every output of one request; must not block or raise."""


OnReady = Callable[[dict[str, ModelInfo], int], None]
"""Called once, with the models by name and the device memory for pages in bytes, before any report or output is
delivered."""

OnReport = Callable[[LoadReport, EngineStats | None], None]
"""Called with an engine's load and statistics, before the outputs of the same message are delivered."""


class EngineClient:
    """Called in this order: start, ready, submit and abort, stop, close. The owner runs `run` as a task.

    start_seconds: the engine is killed if it is not ready this long after a machine had room for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: EngineBackend,
        on_ready: OnReady,
        on_report: OnReport,
        start_seconds: float,
    ) -> None:
        self._config = config
        self._backend = backend
        self._on_ready = on_ready
        self._on_report = on_report
        self._socket: zmq.asyncio.Socket  # from `start` on
        self._opened = ExitStack()  # closes what `start` has opened
        self._engine: StartedEngine | None = None
        self._waiters: dict[str, Waiter] = {}  # request id -> its callback
        self._epoch = secrets.randbits(64)
        self._envelopes = Envelopes(self._epoch)
        self._birth = EngineBirth()
        self._ready: asyncio.Future[dict[str, ModelInfo]] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._start_seconds = start_seconds
        self._start_timer: asyncio.TimerHandle | None = None  # until it is ready
        self._silence = SilenceWatch(config.hang_seconds, self._on_silence)
        self._killed_for = ""  # why it was killed by this class, if it was
        self.error: StencilError | None = None  # why it is gone; None while it is not

    # ---------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Have the engine started and return; see `ready`. Raises ConfigError, also where the machine lacks room on its
        disk, memory, processes or descriptors.
        """
        try:
            self._open_socket()
            self._engine = self._backend.start(self._config, self._epoch, self._socket)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"the engine cannot be started: {error}") from error
        self._limit_start(self._start_seconds)

    def _open_socket(self) -> None:
        context = zmq.asyncio.Context()
        self._opened.callback(context.term)
        self._socket = context.socket(zmq.DEALER)
        self._opened.callback(self._socket.close)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)

    async def run(self) -> None:
        """Receive until the engine is gone; then fail all requests that still wait."""
        assert self._engine is not None
        async with asyncio.TaskGroup() as tasks:
            receiver = tasks.create_task(self._receive())
            await self._engine.wait()
            await asyncio.sleep(LAST_WORDS_SECONDS)  # its last messages say more than its exit code
            receiver.cancel()
        self._unwatch()
        self.fail(EngineDeadError(self._killed_for or self._engine.describe_exit()))

    def _limit_start(self, seconds: float) -> None:
        self._start_timer = asyncio.get_running_loop().call_later(seconds, self._on_slow_start)

    def _on_slow_start(self) -> None:
        assert self._engine is not None
        now, placed = time.monotonic(), self._engine.placed
        left = self._start_seconds + (now if placed is None else placed) - now
        if left > 0:
            return self._limit_start(left)
        self._kill(f"the engine did not serve within {self._start_seconds:g} s (--start-seconds) and was killed")

    def _on_silence(self) -> None:
        self._kill(f"the engine gave no sign of life in {self._config.hang_seconds:g} s and was killed")

    def _kill(self, why: str) -> None:
        """Kill an engine that hangs, and with it its workers. Waiters are failed only when it is gone (`run`): until
        then it may still touch their memory."""
        assert self._engine is not None
        logger.error("%s", why, extra=of_request(""))
        self._killed_for = why
        self._engine.kill()

    def _stop_start_timer(self) -> None:
        if self._start_timer is not None:
            self._start_timer.cancel()

    def _unwatch(self) -> None:
        self._silence.close()
        self._stop_start_timer()

    async def ready(self) -> dict[str, ModelInfo]:
        """Wait until the models are loaded; name -> info. Raises the error that kept the engine from starting."""
        return await asyncio.shield(self._ready)

    async def failed(self) -> StencilError:
        """Wait until the engine is gone and return the reason."""
        await self._gone.wait()
        assert self.error is not None
        return self.error

    @property
    def is_ready(self) -> bool:
        return self._ready.done() and self.error is None

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for it."""
        return not self._waiters

    @property
    def is_placed(self) -> bool:
        """Whether a machine had room for it."""
        return self._engine is not None and self._engine.placed is not None

    @property
    def link(self) -> MachineLink | None:
        """See StartedEngine."""
        return None if self._engine is None else self._engine.link

    def leave(self, why: str) -> None:
        """End an engine whose machine leaves, at once; as after a death, its requests can go on elsewhere."""
        if self.error is None and not self._killed_for:
            self._kill(why)

    async def stop(self) -> None:
        """Abort all requests and end the engine. One that has failed is already exiting."""
        if self._engine is None:
            return
        if self.is_ready:
            self.abort(tuple(self._waiters))
            self._send(Drain())
        elif self.error is None:
            self._engine.kill()  # while loading it reads no messages; its workers end with it
        await self._engine.stop(STOP_SECONDS)

    async def close(self) -> None:
        """Kill the engine if it still runs, fail all requests and close the socket."""
        self._unwatch()
        if self._engine is not None:
            self._engine.kill()
            await self._engine.wait()
        self.fail(EngineDeadError("the engine has stopped"))
        self._opened.close()
        if self._engine is not None:
            self._engine.close()

    def fail(self, error: StencilError) -> None:
        """Mark the engine as gone and fail all waiters. Only the first call counts, so `error` is the first reason."""
        if self.error is not None:
            return
        self.error = error
        self._gone.set()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marks it as retrieved: `ready` may never be called
        failure = Failure.of(EngineDeadError(str(error)))  # of this kind for any reason, so that requests are retried
        for request_id in list(self._waiters):
            self._deliver(Failed(request_id=request_id, failure=failure))

    # ---------------------------------------------------------------------------------- messages

    def submit(self, request: EngineRequest | PrimeTemplate | Addition, waiter: Waiter) -> None:
        """Send a request; `waiter` is called with every output, the last one terminal. Raises EngineDeadError;
        MessageError for a request that cannot be encoded, which is not registered then.
        """
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        payload = self._sealed(request)
        self._waiters[request.request_id] = waiter
        self._send_bytes(payload)

    def drop(self, what: DropTemplate | Removal) -> None:
        """Have the engine drop a template's pages on every tier, or what it has taken in use while it serves."""
        if self.error is None:
            self._send(what)

    def use_adapters(self, use: UseAdapters) -> None:
        """Tell of a request that its late adapters are loaded."""
        if self.error is None:
            self._send(use)

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Abort requests; the terminal output of each still follows."""
        if self.error is None:
            self._send(Abort(request_ids=request_ids))

    def _send(self, message: ToEngine) -> None:
        self._send_bytes(self._sealed(message))

    def _sealed(self, message: ToEngine) -> bytes:
        """A message as bytes, to be sent to this incarnation of the engine alone."""
        return self._envelopes.seal(moved(message, -self._birth.time))

    def _send_bytes(self, payload: bytes) -> None:
        """Without a high-water mark, a send succeeds or fails at once."""
        sent = self._socket.send(payload, zmq.NOBLOCK)
        asyncio.ensure_future(sent).add_done_callback(self._check_sent)

    def _check_sent(self, sent: asyncio.Future[Any]) -> None:
        if not sent.cancelled() and (error := sent.exception()) is not None:
            self.fail(EngineDeadError(f"the engine cannot be reached: {error}"))

    async def _receive(self) -> None:
        decoder: MessageDecoder[FromEngine] = MessageDecoder(FromEngine)
        while True:
            payload = await self._socket.recv()
            try:
                opened = self._envelopes.open(payload)
                if opened is None:
                    continue
                message = decoder.decode(opened.body)
            except MessageError as error:  # outputs and a change of its load are lost, so it cannot go on
                return self._kill(f"the engine is out of order and was killed: {error}")
            self._birth.note(opened.age, time.monotonic())
            self._handle(moved(message, self._birth.time))

    def _handle(self, message: FromEngine) -> None:
        self._silence.note_message()
        if self.error is not None:
            return  # all waiters were failed already
        match message:
            case EngineOutputs():
                self._on_report(message.load, message.stats)
                for output in message.outputs:
                    self._deliver(output)
            case EngineAlive():
                pass
            case EngineReady():
                self._stop_start_timer()
                models = {info.name: info for info in message.models}
                self._ready.set_result(models)
                self._on_ready(models, message.device_page_bytes)
            case EngineFailed():
                if message.failure.detail:
                    logger.error("the engine failed: %s\n%s", message.failure.message, message.failure.detail)
                for output in message.outputs:
                    self._deliver(output)
                self.fail(message.failure.to_error())

    def _deliver(self, output: Output) -> None:
        """Call the waiter, which is removed after a terminal output. An unknown id is a bug and raises KeyError."""
        waiter = self._waiters[output.request_id]
        if not isinstance(output, PartialImage | AdaptersUsed):
            del self._waiters[output.request_id]
        waiter(output)

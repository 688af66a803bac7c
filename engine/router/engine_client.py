"""EngineClient: one engine process as the API server sees it. Spawns it, carries messages, routes outputs to who waits.

Owns the map request id -> waiter. A death of the engine, or of anything below it, reaches every waiter.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.costs.load_report import EngineStats, LoadReport
from core.errors import ConfigError, EngineDeadError, MessageError, StencilError
from core.failure import Failure
from core.ipc.logs import of_request
from core.ipc.process import ChildProcess, spawn
from core.ipc.shared_array import Arena
from core.messages.codec import MessageDecoder, encode
from core.messages.engine import (
    Abort,
    Aborted,
    Drain,
    DropTemplate,
    EngineAlive,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    Failed,
    Finished,
    FromEngine,
    PartialImage,
    PrimeTemplate,
    TemplatePrimed,
    ToEngine,
)
from core.messages.salvage import readable_outputs
from core.model_info import ModelInfo
from engine.engine_core.engine_process import EngineProcessConfig
from engine.engine_core.watchdog import SilenceWatch

logger = logging.getLogger("stencil.engine")

STOP_SECONDS = 5.0
"""How long an engine with nothing left to do may take to leave before it is killed."""

LAST_WORDS_SECONDS = 0.1
"""How long after an engine's end its last messages may still come out of the socket."""

RequestOutput = PartialImage | Finished | TemplatePrimed | Failed | Aborted
Waiter = Callable[[RequestOutput], None]
"""Called in the event loop with every output of one request; must not block or raise."""


OnReady = Callable[[dict[str, ModelInfo], int], None]
"""Called once, with the models by name and the bytes that pages may take on the device, before anything else that the
engine says is handed out."""

OnReport = Callable[[LoadReport, EngineStats | None], None]
"""Called with what an engine says of itself, before its outputs are handed out."""


class EngineClient:
    """start, ready, submit and abort, stop, close. One task (`run`) of the owner's group drives it.

    start_seconds: the engine is killed that does not serve after so long.
    """

    def __init__(
        self, config: EngineConfig, arena: Arena, on_ready: OnReady, on_report: OnReport, start_seconds: float
    ) -> None:
        self._config = config
        self._arena = arena
        self._on_ready = on_ready
        self._on_report = on_report
        self._runtime_dir: Path | None = None  # holds the socket until the engine has connected, and removed it
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._process: ChildProcess | None = None
        self._waiters: dict[str, Waiter] = {}  # request id -> who hears of it
        self._ready: asyncio.Future[dict[str, ModelInfo]] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._start_seconds = start_seconds
        self._start_timer: asyncio.TimerHandle | None = None  # until it serves
        self._silence = SilenceWatch(config.hang_seconds, self._on_silence)
        self._killed_for = ""  # why it was killed from here, if it was
        self.error: StencilError | None = None  # why it is gone, once it is

    # ---------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Spawn the process; the model loads while this process goes on. Raises ConfigError."""
        self._runtime_dir = Path(tempfile.mkdtemp(prefix="stencil-"))  # mode 0700
        address = f"ipc://{self._runtime_dir}/engine"
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot make a socket at {address}: {error}; set TMPDIR to a shorter path") from error
        self._process = spawn(
            "engine.engine_core.engine_process:main",
            msgspec.msgpack.encode(EngineProcessConfig(self._config, address, self._arena.id)),
            [self._arena.fd],
            f"stencil-engine-{self._config.data_parallel_rank}",
            remove=[str(self._runtime_dir)],
        )
        self._start_timer = asyncio.get_running_loop().call_later(self._start_seconds, self._on_slow_start)

    async def run(self) -> None:
        """Receive until the process is gone; then fail whoever still waits."""
        assert self._process is not None
        async with asyncio.TaskGroup() as tasks:
            receiver = tasks.create_task(self._receive())
            await self._process.wait()
            await asyncio.sleep(LAST_WORDS_SECONDS)  # they say more than its exit code
            receiver.cancel()
        self._unwatch()
        why = self._killed_for or f"the engine process died ({self._process.describe_exit()})"
        self.fail(EngineDeadError(why))

    def _on_slow_start(self) -> None:
        self._kill(f"the engine did not serve within {self._start_seconds:g} s (--start-seconds) and was killed")

    def _on_silence(self) -> None:
        self._kill(f"the engine gave no sign of life in {self._config.hang_seconds:g} s and was killed")

    def _kill(self, why: str) -> None:
        """End a process that hangs, and with it its workers; those who wait are told once it is gone, as nothing may
        touch their memory any more."""
        assert self._process is not None
        logger.error("%s", why, extra=of_request(""))
        self._killed_for = why
        self._process.kill()

    def _serves_in_time(self) -> None:
        if self._start_timer is not None:
            self._start_timer.cancel()

    def _unwatch(self) -> None:
        self._silence.close()
        self._serves_in_time()

    async def ready(self) -> dict[str, ModelInfo]:
        """Wait until the models are loaded; name -> info. Raises what kept the engine from starting."""
        return await asyncio.shield(self._ready)

    async def failed(self) -> StencilError:
        """Wait for the engine's end and return why it came; never returns while all is well."""
        await self._gone.wait()
        assert self.error is not None
        return self.error

    @property
    def is_ready(self) -> bool:
        return self._ready.done() and self.error is None

    async def stop(self) -> None:
        """Abort what still runs and leave no process behind. One that has failed is leaving by itself."""
        if self._process is None:
            return
        if self.is_ready:
            self.abort(tuple(self._waiters))
            self._send(Drain())
        elif self.error is None:
            self._process.kill()  # it is loading and reads no messages; its workers leave with it
        await self._process.stop(STOP_SECONDS)

    async def close(self) -> None:
        """Kill the process if it still runs, and free the socket; nobody waits for anything any more."""
        self._unwatch()
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
        self.fail(EngineDeadError("the engine has stopped"))
        self._socket.close()
        self._context.term()
        self._remove_runtime_dir()

    def fail(self, error: StencilError) -> None:
        """Tell everyone who waits that the engine is gone, once: the first reason is the one that counts."""
        if self.error is not None:
            return
        self.error = error
        self._gone.set()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # not everyone waits for readiness: mark it as seen
        failure = Failure.of(EngineDeadError(str(error)))  # whatever ended the engine: to its requests it is dead
        for request_id in list(self._waiters):
            self._deliver(Failed(request_id=request_id, failure=failure))

    def _remove_runtime_dir(self) -> None:
        if self._runtime_dir is not None:
            shutil.rmtree(self._runtime_dir, ignore_errors=True)

    # ---------------------------------------------------------------------------------- messages

    def submit(self, request: EngineRequest | PrimeTemplate, waiter: Waiter) -> None:
        """Hand a request over; `waiter` hears every output, the last one terminal. Raises EngineDeadError; MessageError
        for a request that cannot be encoded, of which nothing is kept.
        """
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        payload = encode(request)
        self._waiters[request.request_id] = waiter
        self._send_bytes(payload)

    def drop(self, template: DropTemplate) -> None:
        """Have a template's pages forgotten on every tier."""
        if self.error is None:
            self._send(template)

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Ask for an early end; the terminal output still comes."""
        if self.error is None:
            self._send(Abort(request_ids=request_ids))

    def _send(self, message: ToEngine) -> None:
        self._send_bytes(encode(message))

    def _send_bytes(self, payload: bytes) -> None:
        """Without a high-water mark a send succeeds at once or not at all."""
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
                message = decoder.decode(payload)
            except MessageError as error:
                self._handle_unreadable(payload, error)
            else:
                self._handle(message)

    def _handle_unreadable(self, payload: bytes, error: MessageError) -> None:
        """Hand out what can be read of it."""
        logger.error("%s", error, extra=of_request(""))
        self._silence.heard()
        for output in readable_outputs(payload, error):
            if output.request_id in self._waiters:
                self._deliver(output)

    def _handle(self, message: FromEngine) -> None:
        self._silence.heard()
        if self.error is not None:
            return  # everybody has been told that it is gone
        match message:
            case EngineOutputs():
                self._on_report(message.load, message.stats)
                for output in message.outputs:
                    self._deliver(output)
            case EngineAlive():
                pass
            case EngineReady():
                self._serves_in_time()
                models = {info.name: info for info in message.models}
                self._ready.set_result(models)
                self._on_ready(models, message.device_page_bytes)
            case EngineFailed():
                if message.failure.detail:
                    logger.error("the engine failed: %s\n%s", message.failure.message, message.failure.detail)
                for output in message.outputs:
                    self._deliver(output)
                self.fail(message.failure.to_error())

    def _deliver(self, output: RequestOutput) -> None:
        """A terminal output ends its waiter's entry; an unknown id is a bug and raises KeyError."""
        waiter = self._waiters[output.request_id]
        if not isinstance(output, PartialImage):
            del self._waiters[output.request_id]
        waiter(output)

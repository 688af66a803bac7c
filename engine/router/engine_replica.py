"""EngineReplica: the place of one engine. Starts it, and anew when it dies, until that has become pointless.

What an engine holds dies with it: its requests are the router's to send elsewhere, its pages are made again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol

import msgspec

from core.config import EngineConfig
from core.costs.load_report import EngineStats, LoadReport
from core.errors import ConfigError, EngineDeadError, StencilError
from core.ipc.logs import of_request
from core.ipc.shared_array import Arena
from core.messages.engine import DropTemplate, EngineRequest, PrimeTemplate
from core.model_info import ModelInfo
from engine.router.engine_client import EngineClient, Waiter

logger = logging.getLogger("stencil.router")

MAX_RESTARTS = 4
"""Restarts in a row after which an engine is given up."""

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 1.0, 30.0
"""Before the second restart in a row, and twice as long before each one more, but no longer than so. The first comes at
once: most deaths are the only one."""

PROVEN_SECONDS = 60.0
"""How long an engine must have served for its next death not to count as one more in a row."""

RESTART_PATIENCE, MIN_RESTART_SECONDS = 10.0, 600.0
"""How much longer than at its first start an engine may take to serve again, and how long at least. Its files are here
by now: it does not get the hours that a download may take, while its requests wait."""

ReplicaState = Literal["loading", "serving", "restarting", "gone"]
"""loading: for the first time. restarting: after its death, or waiting to be. gone: given up."""


class ReplicaWatcher(Protocol):
    """Who hears of an engine; `engine.router.router.Router` is the real one. None of these may block or raise."""

    def on_up(self, rank: int) -> None:
        """It serves, for the first time or again."""

    def on_report(self, rank: int, load: LoadReport, stats: EngineStats | None) -> None:
        """It says how it is."""

    def on_down(self, rank: int, error: StencilError) -> None:
        """It has died. May be said more than once for a death."""

    def on_restart(self, rank: int) -> None:
        """It is started anew."""

    def on_given_up(self, rank: int) -> None:
        """It has died for the last time: `error` says why."""


class EngineReplica:
    """start, ready, submit and abort, stop, close. One task (`run`) of the owner's group drives it."""

    def __init__(self, config: EngineConfig, arena: Arena, watcher: ReplicaWatcher) -> None:
        self.rank = config.data_parallel_rank
        self.error: StencilError | None = None  # why it is never started again, once it is not
        self.cache = config.cache  # what it was found to have is in it from its first start on
        self._config = config
        self._arena = arena
        self._watcher = watcher
        self._models: dict[str, ModelInfo] | None = None  # what it served at its first start
        self._up_since = 0.0  # when it began to serve; 0: not since its last start
        self._started = 0.0  # when it was started last
        self._start_seconds = config.start_seconds  # how long its next start may take
        self.num_restarts = 0  # in a row
        self._late_drops: list[DropTemplate] = []  # to be sent once it serves
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        self._client = self._make_client()

    # ---------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Spawn the process; the model loads while this process goes on. Raises ConfigError."""
        self._started = time.monotonic()
        self._client.start()

    async def run(self) -> None:
        """Serve until it is stopped or given up. It has been started."""
        while True:
            error = await self._serve()
            if not self._may_restart():
                break
            await self._wait_to_restart(error)
            if self._stopping.is_set():
                break
            self._restart()
        self.give_up(error)

    async def _serve(self) -> StencilError:
        """Until the engine is gone, and all of its processes."""
        client = self._client
        if client.error is None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(client.run())
                error = await client.failed()
                self._watcher.on_down(self.rank, error)
                await client.stop()
        assert client.error is not None
        await client.close()
        return client.error

    def _may_restart(self) -> bool:
        """Whether it is worth it: what never served does not start, and what keeps dying at once goes on so."""
        if self._up_since and time.monotonic() - self._up_since >= PROVEN_SECONDS:
            self.num_restarts = 0
        return not self._stopping.is_set() and self._models is not None and self.num_restarts < MAX_RESTARTS

    async def _wait_to_restart(self, error: StencilError) -> None:
        """What keeps dying at once is given time: whatever it lacks, memory or a device, may come back."""
        seconds = wait_before(self.num_restarts)
        self.num_restarts += 1
        message = "engine %d is started anew in %.0f s, restart %d of at most %d in a row: %s"
        logger.error(message, self.rank, seconds, self.num_restarts, MAX_RESTARTS, error, extra=of_request(""))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _restart(self) -> None:
        self._up_since = 0.0
        self._client = self._make_client()
        self._watcher.on_restart(self.rank)
        try:
            self.start()
        except StencilError as reason:
            self._client.fail(reason)

    def _make_client(self) -> EngineClient:
        on_report = partial(self._watcher.on_report, self.rank)
        return EngineClient(self._config, self._arena, self._on_ready, on_report, self._start_seconds)

    def _on_ready(self, models: dict[str, ModelInfo], device_page_bytes: int) -> None:
        if self._models is not None and models != self._models:
            self._client.fail(ConfigError("the engine no longer serves its models in the same way"))
            return
        self._up_since = time.monotonic()
        if self._models is None:
            patience = max(MIN_RESTART_SECONDS, RESTART_PATIENCE * (self._up_since - self._started))
            self._start_seconds = min(self._start_seconds, patience)
            # Measured once: whether a picture's pages fit must not change with a restart.
            self.cache = msgspec.structs.replace(self.cache, device_bytes=device_page_bytes)
            self._config = msgspec.structs.replace(self._config, cache=self.cache)
        self._models = models
        while self._late_drops:
            self._client.drop(self._late_drops.pop())
        self._watcher.on_up(self.rank)

    async def ready(self) -> dict[str, ModelInfo]:
        """Wait until its models are loaded; name -> info. Raises what kept the engine from starting."""
        return await self._client.ready()

    async def failed(self) -> StencilError:
        """Wait until it is given up and return why; never returns while all is well."""
        await self._gone.wait()
        assert self.error is not None
        return self.error

    def give_up(self, error: StencilError) -> None:
        """Tell everyone who waits that it is gone for good, once: the first reason is the one that counts."""
        self._stopping.set()
        self._client.fail(error)
        if self.error is None:
            self.error = error
            self._gone.set()
            self._watcher.on_given_up(self.rank)

    async def stop(self) -> None:
        """Abort what still runs and leave no process behind."""
        self._stopping.set()
        await self._client.stop()

    async def close(self) -> None:
        """Kill what still runs, and free the socket; nobody waits for anything any more."""
        self._stopping.set()
        await self._client.close()
        self.give_up(EngineDeadError("the engine has stopped"))

    @property
    def is_alive(self) -> bool:
        """Whether it serves."""
        return self._client.is_ready

    @property
    def state(self) -> ReplicaState:
        if self.error is not None:
            return "gone"
        if self.is_alive:
            return "serving"
        return "loading" if self._models is None else "restarting"

    # ---------------------------------------------------------------------------------- messages

    def submit(self, request: EngineRequest | PrimeTemplate, waiter: Waiter) -> None:
        """Hand a request over; `waiter` hears every output, the last one terminal. Raises EngineDeadError."""
        self._client.submit(request, waiter)

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Ask for an early end; the terminal output still comes."""
        self._client.abort(request_ids)

    def drop(self, template: DropTemplate) -> None:
        """Have a template's pages forgotten on every tier, now or when it serves again: files outlive an engine."""
        if self._client.is_ready:
            self._client.drop(template)
        elif self.error is None:
            self._late_drops.append(template)


def wait_before(num_restarts: int) -> float:
    """Seconds to wait before the next restart, after so many in a row: 0, 1, 2, 4, ..."""
    return min(MAX_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** (num_restarts - 1)) if num_restarts else 0.0

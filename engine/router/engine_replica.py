"""EngineReplica: supervises one engine: has it started, restarts it with back-off, gives it up if it keeps dying.

Runs in the API server, where the Router sends the requests of a dead engine to another one. Cached pages in memory are
lost with it and primed again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol

import msgspec

from core.config import CacheConfig, EngineConfig
from core.costs.load_report import EngineStats, LoadReport
from core.errors import ConfigError, EngineDeadError, StencilError
from core.ipc.logs import of_request
from core.messages.engine import DropTemplate, EngineRequest, PrimeTemplate, UseAdapters
from core.messages.worker import Addition, Removal
from core.model_info import ModelInfo
from core.restarts import MAX_RESTARTS, Restarts, restart_limit
from core.routing.placement import EnginePlace, PlaceState
from engine.router.engine_backend import EngineBackend, MachineLink
from engine.router.engine_client import EngineClient, Waiter

logger = logging.getLogger("stencil.router")

PROVEN_SECONDS = 60.0
"""An engine that has served for this long starts again with 0 restarts in a row."""

PLACE_SECONDS = 10.0
"""An engine that no machine had room for after this long waits until others give room back."""

MOST_LATE_DROPS = 10_000
"""The last drops are kept for an engine that is down, and no more, since it may wait for room for ever. Where a drop is
lost, the template's files stay until others need their room: nobody reads them."""

MAKE_ALIKE = "give all of them one type of device, or of CPU and one C compiler"
"""What to do about engines that differ."""

ReplicaState = Literal["loading", "serving", "restarting", "draining", "gone"]
"""loading: first start. restarting: died, and is starting again or waiting to. draining: its machine leaves, so it ends
once it has done what it has. gone: given up."""


class ReplicaWatcher(Protocol):
    """Callbacks of an EngineReplica; implemented by `engine.router.engines.Engines`. They must not block or raise."""

    def on_up(self, rank: int) -> None:
        """The engine is ready, for the first time or again."""

    def on_report(self, rank: int, load: LoadReport, stats: EngineStats | None) -> None:
        """The engine has sent its load, and its statistics unless they are recent."""

    def on_down(self, rank: int, error: StencilError) -> None:
        """The engine has died. May be called more than once for a death."""

    def on_restart(self, rank: int) -> None:
        """The engine is restarted."""

    def on_given_up(self, rank: int) -> None:
        """The engine is given up and will not be restarted; the replica's `error` says why."""


class EngineReplica:
    """Called in this order: start, ready, submit and abort, stop, close. The owner runs `run` as a task."""

    def __init__(
        self,
        config: EngineConfig,
        backend: EngineBackend,
        watcher: ReplicaWatcher,
        like: EngineReplica | None = None,
    ) -> None:
        """like: an engine that has served already, and that this one has to be like."""
        self.rank = config.data_parallel_rank
        self.machine = config.machine
        self.model_names = tuple(model.name for model in config.models)  # that it serves, without adapters
        self.error: StencilError | None = None  # why it was given up; None while it is not
        self.has_served = False  # since it was made
        self.is_draining = False  # its machine leaves: it gets no more requests
        self.is_leaving = False  # it ends for good, since its machine leaves or has left
        # After the first start, with the measured device memory.
        self.cache: CacheConfig = config.cache if like is None else like.cache
        self._config = msgspec.structs.replace(config, cache=self.cache)
        self._backend = backend
        self._watcher = watcher
        # That it has to serve; None: it says which it does.
        self._models: dict[str, ModelInfo] | None = None if like is None else like._models
        self._started = time.monotonic()  # or when it was made, before
        self._start_seconds = config.start_seconds  # time limit of its next start
        self._restarts = Restarts()
        self._late_drops: deque[DropTemplate] = deque(maxlen=MOST_LATE_DROPS)  # to be sent when it is ready
        self._stopping = asyncio.Event()
        self._client = self._make_client()

    # ---------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Have the engine started and return; see `ready`. Raises ConfigError."""
        self._started = time.monotonic()
        self._client.start()

    async def run(self) -> None:
        """Restart the engine when it dies, until it is stopped or given up. Call `start` first."""
        while True:
            error = await self._serve()
            if not self._may_restart():
                break
            await self._wait_to_restart(error)
            if self._ends:
                break
            self._restart()
        self.give_up(error)

    async def _serve(self) -> StencilError:
        """Wait until the engine and all of its processes are gone; returns the reason."""
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
        """Whether to restart: not if no such engine ever was ready or it keeps dying, as it would fail again, nor if it
        would get no request."""
        may_restart = self._restarts.may_restart(time.monotonic(), PROVEN_SECONDS)
        return may_restart and not self._ends and self._models is not None

    @property
    def _ends(self) -> bool:
        """Whether it is not started any more."""
        return self._stopping.is_set() or self.is_draining

    async def _wait_to_restart(self, error: StencilError) -> None:
        seconds = self._restarts.next_wait()
        message = "engine %d is restarted in %.0f s, restart %d of at most %d in a row: %s"
        logger.error(message, self.rank, seconds, self.num_restarts, MAX_RESTARTS, error, extra=of_request(""))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _restart(self) -> None:
        self._client = self._make_client()
        self._watcher.on_restart(self.rank)
        try:
            self.start()
        except StencilError as reason:
            self._client.fail(reason)

    def _make_client(self) -> EngineClient:
        on_report = partial(self._watcher.on_report, self.rank)
        return EngineClient(self._config, self._backend, self._on_ready, on_report, self._start_seconds)

    def _on_ready(self, models: dict[str, ModelInfo], device_page_bytes: int) -> None:
        if self._models is not None and models != self._models:
            what = "no longer serves its models in the same way"
            if not self.has_served:
                what = f"does not serve the same models in the same way as others; {MAKE_ALIKE}"
            self._client.fail(ConfigError(f"the engine {what}"))
            return
        now = time.monotonic()
        self._restarts.note_up(now)
        if not self.has_served:
            self._start_seconds = restart_limit(now - self._started, self._start_seconds)
        if self._models is None:
            # Measured only once: a restart must not change whether a picture's pages fit.
            self.cache = msgspec.structs.replace(self.cache, device_bytes=device_page_bytes)
            self._config = msgspec.structs.replace(self._config, cache=self.cache)
        self._models, self.has_served = models, True
        while self._late_drops:
            self._client.drop(self._late_drops.popleft())
        self._watcher.on_up(self.rank)

    async def ready(self) -> dict[str, ModelInfo]:
        """Wait until its models are loaded; name -> info. Raises the error that kept the engine from starting."""
        return await self._client.ready()

    def give_up(self, error: StencilError) -> None:
        """Give up the engine and fail all waiters. Only the first call counts, so `error` is the first reason."""
        self._stopping.set()
        self._client.fail(error)
        if self.error is None:
            self.error = error
            self._watcher.on_given_up(self.rank)

    async def stop(self) -> None:
        """Abort all requests and end the engine."""
        self._stopping.set()
        await self._client.stop()

    async def leave(self, why: str) -> None:
        """End the engine for good, because its machine leaves; what it still has goes on elsewhere, as after a
        death."""
        self.is_leaving = True
        self._stopping.set()
        if self._client.is_idle:
            await self._client.stop()
        else:
            self._client.leave(why)

    async def close(self) -> None:
        """Kill the engine if it still runs, fail all requests and close the socket."""
        self._stopping.set()
        await self._client.close()
        self.give_up(EngineDeadError("the engine has stopped"))

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for it."""
        return self._client.is_idle

    @property
    def link(self) -> MachineLink | None:
        """The way to it; None: it is of this machine, or of none yet."""
        return self._client.link

    @property
    def incarnation(self) -> Hashable:
        """Another one after each restart."""
        return self._client

    @property
    def num_restarts(self) -> int:
        """Restarts in a row."""
        return self._restarts.in_a_row

    @property
    def is_alive(self) -> bool:
        """Whether the engine is ready and not known to be dead."""
        return self._client.is_ready

    @property
    def state(self) -> ReplicaState:
        if self.error is not None:
            return "gone"
        if self.is_draining:
            return "draining"
        if self.is_alive:
            return "serving"
        return "restarting" if self.has_served else "loading"

    @property
    def place(self) -> EnginePlace:
        """Where it is in a cluster."""
        return EnginePlace(self.machine, self._place_state, self.is_idle)

    @property
    def _place_state(self) -> PlaceState:
        if self.error is not None:
            return "gone"
        if self.is_draining:
            return "draining"
        if self.has_served:
            return "served"
        waits_for_room = not self._client.is_placed and time.monotonic() - self._started > PLACE_SECONDS
        return "waiting" if waits_for_room else "starting"

    # ---------------------------------------------------------------------------------- messages

    def submit(self, request: EngineRequest | PrimeTemplate | Addition, waiter: Waiter) -> None:
        """Send a request; `waiter` is called with every output, the last one terminal. Raises as EngineClient's."""
        self._client.submit(request, waiter)

    def use_adapters(self, use: UseAdapters) -> None:
        """Tell of a request that its late adapters are loaded."""
        self._client.use_adapters(use)

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Abort requests; the terminal output of each still follows."""
        self._client.abort(request_ids)

    def remove(self, removal: Removal) -> None:
        """Have the engine drop what it has taken in use while it serves; one that is down has lost it."""
        if self._client.is_ready:
            self._client.drop(removal)

    def drop(self, template: DropTemplate) -> None:
        """Have the engine drop a template's pages on every tier, when it is ready if it is down: files survive it."""
        if self._client.is_ready:
            self._client.drop(template)
        elif self.error is None:
            self._late_drops.append(template)

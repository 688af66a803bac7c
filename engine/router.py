"""Router: N engines as one. Picks an engine for every request, remembers which, and hears them all.

What it knows of them and how it picks is core's (fleet.py, routing.py); the processes and sockets are EngineClient's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import msgspec

from core.config import StencilConfig
from core.errors import ConfigError, EngineDeadError, StencilError
from core.fleet import EditShape, Fleet
from core.ipc.logs import of_request
from core.ipc.shared_array import Arena
from core.load_report import EngineStats, LoadReport
from core.messages import EditRequest, Finished, ModelInfo, PartialImage, PrimeTemplate
from core.routing import make_policy
from engine.engine_client import EngineClient, RequestOutput, Waiter
from engine.metrics import Metrics

logger = logging.getLogger("stencil.router")


@dataclass(slots=True)
class Placement:
    """Where a request was sent and when, and after how many seconds it is predicted to be done."""

    engine: int
    sent: float
    predicted_seconds: float | None


class Router:
    """start, ready, submit and abort, stop, close. One task (`run`) of the owner's group drives it."""

    def __init__(self, config: StencilConfig, arena: Arena, metrics: Metrics) -> None:
        size = config.engine.data_parallel_size
        self.loads: list[LoadReport | None] = [None] * size  # by engine
        self.stats: list[EngineStats | None] = [None] * size
        self._clients = [
            EngineClient(
                msgspec.structs.replace(config.engine, data_parallel_rank=rank),
                arena,
                partial(self._on_report, rank),
            )
            for rank in range(size)
        ]
        self._models: dict[str, ModelInfo] = {}
        self._fleet = Fleet(size, config.engine.scheduler.max_num_seqs)
        self._policy = make_policy(config.router_policy)
        self._metrics = metrics
        self._is_stopping = False
        self._placements: dict[str, Placement] = {}  # request id -> where it is, until its terminal output

    # ---------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Spawn the first engine; the others follow when it is ready. Raises ConfigError."""
        self._clients[0].start()

    async def run(self) -> None:
        """Serve until the last engine is gone."""
        async with asyncio.TaskGroup() as tasks:
            for rank in range(len(self._clients)):
                tasks.create_task(self._run_engine(rank), name=f"engine-{rank}")

    async def _run_engine(self, rank: int) -> None:
        client = self._clients[rank]
        if rank > 0 and not await self._follow(client):
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.run())
            error = await client.failed()
            self._lose(rank, error)

    async def _follow(self, client: EngineClient) -> bool:
        """Start an engine once the first one is ready: that one measures what work costs, which they all read, and
        nothing may disturb it. False: there is nothing to follow.
        """
        try:
            await self._clients[0].ready()
            if not self._is_stopping:
                client.start()
                return True
        except StencilError as error:
            client.fail(error)
        client.fail(EngineDeadError("the engine was not started"))
        return False

    async def ready(self) -> dict[str, ModelInfo]:
        """Wait until every engine serves; model name -> info. Raises what kept one from starting."""
        models, *others = await asyncio.gather(*(client.ready() for client in self._clients))
        if any(other != models for other in others):
            raise ConfigError(
                "the engines do not serve the same models in the same way; give all of them one device type"
            )
        self._models = models
        return models

    async def failed(self) -> StencilError:
        """Wait for the last engine's end and return why it came; never returns while one of them lives."""
        errors = [await client.failed() for client in self._clients]
        return errors[-1]

    def fail(self, error: StencilError) -> None:
        """Tell everyone who waits that all engines are gone."""
        for client in self._clients:
            client.fail(error)

    async def stop(self) -> None:
        """Abort what still runs and leave no process behind."""
        self._is_stopping = True
        await asyncio.gather(*(client.stop() for client in self._clients))

    async def close(self) -> None:
        """Kill what still runs, and free the sockets; nobody waits for anything any more."""
        for client in self._clients:
            await client.close()

    # ---------------------------------------------------------------------------------- what it knows

    @property
    def error(self) -> StencilError | None:
        """Why nothing is served any more; None while an engine lives."""
        errors = [client.error for client in self._clients]
        return None if None in errors else errors[-1]

    @property
    def is_ready(self) -> bool:
        """Whether at least one engine serves."""
        return any(self.alive)

    @property
    def alive(self) -> list[bool]:
        """Which engines serve."""
        return [client.is_ready for client in self._clients]

    @property
    def drain_seconds(self) -> float:
        """Predicted time until an engine has done all that it holds."""
        return min((load.drain_seconds for load in self._living(self.loads) if load is not None), default=0.0)

    @property
    def num_running(self) -> int:
        return sum(load.num_running for load in self._living(self.loads) if load is not None)

    @property
    def num_waiting(self) -> int:
        """Requests queued in the engines."""
        return sum(load.num_waiting for load in self._living(self.loads) if load is not None)

    def engine_of(self, request_id: str) -> int | None:
        """The engine that has a request, until its terminal output."""
        placement = self._placements.get(request_id)
        return placement.engine if placement else None

    def _living(self, reports: Iterable[LoadReport | None]) -> Iterable[LoadReport | None]:
        return (report for report, client in zip(reports, self._clients, strict=True) if client.error is None)

    # ---------------------------------------------------------------------------------- messages

    def submit(self, request: EditRequest | PrimeTemplate, waiter: Waiter) -> None:
        """Hand a request to an engine; `waiter` hears every output, the last one terminal. Raises EngineDeadError."""
        shape = self._shape(request)
        while True:
            now = time.monotonic()
            choice = self._policy.choose(shape, self._fleet, now)
            self._placements[request.request_id] = Placement(choice.engine, now, choice.predicted_seconds)
            try:
                self._clients[choice.engine].submit(request, partial(self._hear, waiter))
                break
            except EngineDeadError as error:  # it died a moment ago
                del self._placements[request.request_id]
                self._lose(choice.engine, error)
        self._fleet.sent(choice.engine, shape, now)
        self._metrics.observe_routed(choice.engine)

    def drop(self, model: str, content_id: str) -> None:
        """Have a template's pages forgotten by every engine."""
        for client in self._clients:
            client.drop(model, content_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ask for an early end; the terminal output still comes."""
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            placement = self._placements.get(request_id)
            if placement is not None:
                by_engine.setdefault(placement.engine, []).append(request_id)
        for engine, ids in by_engine.items():
            self._clients[engine].abort(tuple(ids))

    def _shape(self, request: EditRequest | PrimeTemplate) -> EditShape:
        info = self._models[request.model]
        if isinstance(request, PrimeTemplate):
            return EditShape.of_template(request, info)
        return EditShape.of_edit(request, info)

    def _hear(self, waiter: Waiter, output: RequestOutput) -> None:
        if not isinstance(output, PartialImage):
            placement = self._placements.pop(output.request_id)
            if isinstance(output, Finished) and placement.predicted_seconds is not None:
                seconds = time.monotonic() - placement.sent
                self._metrics.observe_prediction(placement.predicted_seconds, seconds)
        waiter(output)

    def _on_report(self, engine: int, load: LoadReport, stats: EngineStats | None) -> None:
        self.loads[engine] = load
        self.stats[engine] = stats or self.stats[engine]
        self._fleet.observe(engine, load, time.monotonic())
        self._metrics.observe_load(engine, load, stats)

    def _lose(self, engine: int, error: StencilError) -> None:
        """Send nothing there any more."""
        if self._fleet.is_alive[engine] and self.error is None and self._models and not self._is_stopping:
            logger.error("engine %d is gone: %s", engine, error, extra=of_request(""))
        self._fleet.lose(engine)
        self._metrics.observe_lost(engine)

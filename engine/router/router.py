"""Router: N engines as one. Picks an engine for every request, remembers which, and hears them all.

A request whose engine dies is sent to another one, or waits until one is up again: the same message, so the same
picture. What it knows of the engines and how it picks is core's (fleet.py, routing.py); their processes are
EngineReplica's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from core.config import CacheConfig, StencilConfig
from core.costs.load_report import EngineStats, LoadReport, StepSample
from core.errors import ConfigError, EngineDeadError, MessageError, StencilError
from core.failure import NEVER_BEGUN, Failure
from core.ipc.logs import of_request
from core.ipc.shared_array import Arena
from core.messages.engine import Aborted, DropTemplate, EngineRequest, Failed, Finished, PartialImage, PrimeTemplate
from core.model_info import ModelInfo
from core.routing.admission import Outlook
from core.routing.fleet import Fleet, RequestShape
from core.routing.policies import make_policy, outlook, work_seconds
from core.scheduling.reporter import MAX_RECENT_STEPS
from engine.observability.metrics import Metrics
from engine.router.engine_client import RequestOutput, Waiter
from engine.router.engine_replica import EngineReplica, ReplicaState

logger = logging.getLogger("stencil.router")

SUSPECT_DEATHS = 2
"""Deaths of engines after which a request that was there runs alone, so that it can take no others along."""


@dataclass(slots=True)
class RoutedRequest:
    """A request, from submission to its terminal output.

    engine: where it is; None: it waits for one to be up. sent: when it was sent there; predicted_seconds: how long it
    was then predicted to take.
    """

    message: EngineRequest | PrimeTemplate
    waiter: Waiter
    engine: int | None = None
    sent: float = 0.0
    predicted_seconds: float | None = None
    has_begun: bool = False  # a worker of that engine's has been given it
    is_bystander: bool = False  # that engine died while others' work was begun, and its own was not
    num_deaths: int = 0  # of engines that it may have had a part in
    was_retried: bool = False  # an engine that had it has died, whoever had a part in it
    is_aborted: bool = False  # nobody wants it any more
    partials_told: set[int] = field(default_factory=set)  # indices of partial images


class Router:
    """start, ready, submit and abort, stop, close. One task (`run`) of the owner's group drives it."""

    def __init__(self, config: StencilConfig, arena: Arena, metrics: Metrics) -> None:
        size = config.engine.data_parallel_size
        self.loads: list[LoadReport | None] = [None] * size  # by engine
        self.stats: list[EngineStats | None] = [None] * size
        self.recent_steps = tuple(deque[StepSample](maxlen=MAX_RECENT_STEPS) for _ in range(size))
        self._replicas = [
            EngineReplica(msgspec.structs.replace(config.engine, data_parallel_rank=rank), arena, self)
            for rank in range(size)
        ]
        self._models: dict[str, ModelInfo] = {}
        self._fleet = Fleet(size, config.engine.scheduler.max_num_seqs)
        self._policy = make_policy(config.router_policy)
        self._max_retries = config.max_retries
        self._metrics = metrics
        self._is_stopping = False
        self._placements: dict[str, RoutedRequest] = {}  # request id -> where it is, until its terminal output

    # ---------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Spawn the first engine; the others follow when it is ready. Raises ConfigError."""
        self._replicas[0].start()

    async def run(self) -> None:
        """Serve until the last engine is gone for good."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(self._run_engine(replica), name=f"engine-{replica.rank}")

    async def _run_engine(self, replica: EngineReplica) -> None:
        if replica.rank == 0 or await self._follow(replica):
            await replica.run()

    async def _follow(self, replica: EngineReplica) -> bool:
        """Start an engine once the first one is ready: that one measures what work costs, which they all read, and
        nothing may disturb it. False: there is nothing to follow.
        """
        try:
            await self._replicas[0].ready()
            if not self._is_stopping:
                replica.start()
                return True
        except StencilError as error:
            replica.give_up(error)
        replica.give_up(EngineDeadError("the engine was not started"))
        return False

    async def ready(self) -> dict[str, ModelInfo]:
        """Wait until every engine serves; model name -> info. Raises what kept one from starting."""
        models, *others = await asyncio.gather(*(replica.ready() for replica in self._replicas))
        if any(other != models for other in others):
            raise ConfigError(
                "the engines do not serve the same models in the same way; give all of them one device type"
            )
        self._models = models
        return models

    @property
    def cache(self) -> CacheConfig:
        """The engines' limits, once they are ready: the least device memory for pages that any of them has."""
        return min((replica.cache for replica in self._replicas), key=lambda cache: cache.device_bytes or 0)

    async def failed(self) -> StencilError:
        """Wait until the last engine is given up and return why; never returns while one serves or is started anew."""
        errors = [await replica.failed() for replica in self._replicas]
        return errors[-1]

    def fail(self, error: StencilError) -> None:
        """Tell everyone who waits that all engines are gone."""
        self._is_stopping = True
        for replica in self._replicas:
            replica.give_up(error)

    async def stop(self) -> None:
        """Abort what still runs and leave no process behind."""
        self._is_stopping = True
        self.abort([request_id for request_id, routed in self._placements.items() if routed.engine is None])
        await asyncio.gather(*(replica.stop() for replica in self._replicas))

    async def close(self) -> None:
        """Kill what still runs, and free the sockets; nobody waits for anything any more."""
        self._is_stopping = True
        for replica in self._replicas:
            await replica.close()

    # ---------------------------------------------------------------------------------- what it knows

    @property
    def error(self) -> StencilError | None:
        """Why nothing is served any more; None while an engine serves or is started anew."""
        errors = [replica.error for replica in self._replicas]
        return None if None in errors else errors[-1]

    @property
    def is_ready(self) -> bool:
        """Whether at least one engine serves."""
        return any(self.alive)

    @property
    def alive(self) -> list[bool]:
        """Which engines serve. One that tells its requests of its death does not, whatever its process still does."""
        return [replica.is_alive and bool(self._fleet.is_alive[replica.rank]) for replica in self._replicas]

    @property
    def replicas(self) -> list[tuple[ReplicaState, int]]:
        """How each engine is, and how often it was started anew in a row."""
        states = zip(self._replicas, self.alive, strict=True)
        return [
            ("restarting" if replica.is_alive and not alive else replica.state, replica.num_restarts)
            for replica, alive in states
        ]

    @property
    def drain_seconds(self) -> float:
        """Predicted time until an engine has done all that it holds."""
        return min((load.drain_seconds for load in self.loads if load is not None), default=0.0)

    @property
    def num_running(self) -> int:
        return sum(load.num_running for load in self.loads if load is not None)

    @property
    def num_waiting(self) -> int:
        """Requests queued in the engines, or waiting for one."""
        num_homeless = sum(routed.engine is None for routed in self._placements.values())
        return num_homeless + sum(load.num_waiting for load in self.loads if load is not None)

    def has_begun(self, request_id: str) -> bool:
        """Whether a worker has been given a request, or it has ended."""
        routed = self._placements.get(request_id)
        return routed is None or routed.has_begun

    def outlook(self, shape: RequestShape) -> Outlook | None:
        """What is predicted of an edit if it is submitted now; None while nobody knows, or no engine is alive."""
        if not self._fleet.num_alive:
            return None
        return outlook(shape, self._fleet, self._policy, time.monotonic())

    def work_seconds(self, shape: RequestShape) -> float:
        """How much later all engines together are done, for an edit."""
        return work_seconds(shape, self._fleet) / max(1, self._fleet.num_alive)

    def engine_of(self, request_id: str) -> int | None:
        """The engine that has a request, its terminal output included; None while it waits for one."""
        routed = self._placements.get(request_id)
        return routed.engine if routed else None

    def was_retried(self, request_id: str) -> bool:
        """Whether a request was given to an engine that has died since; known until its terminal output is heard."""
        routed = self._placements.get(request_id)
        return routed is not None and routed.was_retried

    # ---------------------------------------------------------------------------------- messages

    def submit(self, request: EngineRequest | PrimeTemplate, waiter: Waiter) -> None:
        """Hand a request to an engine; `waiter` hears every output, the last one terminal. Raises EngineDeadError when
        all are gone for good, and MessageError for a request that cannot be sent; of what raises, nothing is kept.
        """
        if self.error is not None:
            raise EngineDeadError(str(self.error))
        routed = self._placements[request.request_id] = RoutedRequest(request, waiter)
        try:
            self._place(routed)
        except BaseException:
            del self._placements[request.request_id]
            raise

    def drop(self, template: DropTemplate) -> None:
        """Have a template's pages forgotten by every engine."""
        for replica in self._replicas:
            replica.drop(template)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ask for an early end; the terminal output still comes, at once where no engine has the request."""
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            routed = self._placements.get(request_id)
            if routed is None:
                continue
            routed.is_aborted = True
            if routed.engine is None:
                self._end(routed, Aborted(request_id=request_id))
            else:
                by_engine.setdefault(routed.engine, []).append(request_id)
        for engine, ids in by_engine.items():
            self._replicas[engine].abort(tuple(ids))

    def _place(self, routed: RoutedRequest) -> None:
        """Send a request to the engine of choice; it waits if there is none."""
        shape = self._shape(routed.message)
        routed.has_begun = routed.is_bystander = False
        while self._fleet.is_alive.any():
            now = time.monotonic()
            choice = self._policy.choose(shape, self._fleet, now)
            try:
                self._replicas[choice.engine].submit(routed.message, partial(self._hear, choice.engine))
            except EngineDeadError as error:  # it died a moment ago
                self.on_down(choice.engine, error)
                continue
            routed.engine, routed.sent = choice.engine, now
            routed.predicted_seconds = choice.predicted_seconds
            self._fleet.sent(choice.engine, shape, now)
            self._metrics.observe_routed(choice.engine)
            return
        routed.engine = None

    def _place_again(self, routed: RoutedRequest) -> None:
        """Whose caller has left `submit`, and hears of an error as of any other."""
        try:
            self._place(routed)
        except MessageError as error:
            self._end(routed, Failed(request_id=routed.message.request_id, failure=Failure.of(error)))

    def _shape(self, request: EngineRequest | PrimeTemplate) -> RequestShape:
        info = self._models[request.model]
        if isinstance(request, PrimeTemplate):
            return RequestShape.of_template(request, info)
        return RequestShape.of_request(request, info)

    def _hear(self, engine: int, output: RequestOutput) -> None:
        routed = self._placements[output.request_id]
        match output:
            case PartialImage():
                if output.index not in routed.partials_told:
                    routed.partials_told.add(output.index)
                    routed.waiter(output)
            case Failed(failure=Failure(kind="engine_dead") as failure):
                self.on_down(engine, EngineDeadError(failure.message))
                self._survive(routed, failure)
            case _:
                if isinstance(output, Finished) and routed.predicted_seconds is not None:
                    seconds = time.monotonic() - routed.sent
                    self._metrics.observe_prediction(routed.predicted_seconds, seconds)
                self._end(routed, output)

    def _end(self, routed: RoutedRequest, output: RequestOutput) -> None:
        """Hand out a terminal output."""
        routed.waiter(output)
        del self._placements[output.request_id]

    def _survive(self, routed: RoutedRequest, failure: Failure) -> None:
        """Begin a request anew whose engine has died, unless that has become pointless."""
        request_id = routed.message.request_id
        routed.num_deaths += failure.code != NEVER_BEGUN and not routed.is_bystander
        if routed.is_aborted:
            self._end(routed, Aborted(request_id=request_id))
        elif self._is_stopping or self.error is not None:
            self._end(routed, Failed(request_id=request_id, failure=failure))
        elif routed.num_deaths > self._max_retries:
            times = f"{routed.num_deaths} engines" if routed.num_deaths > 1 else "The engine"
            message = f"{times} died while running this request (retries allowed: {self._max_retries}): "
            told = Failure("engine_dead", message + failure.message)
            logger.error("%s", told.message, extra=of_request(request_id))
            self._end(routed, Failed(request_id=request_id, failure=told))
        else:
            self._metrics.observe_retried()
            routed.was_retried = True
            if routed.num_deaths >= SUSPECT_DEATHS and isinstance(routed.message, EngineRequest):
                routed.message = msgspec.structs.replace(routed.message, runs_alone=True)
            self._place_again(routed)

    # ---------------------------------------------------------------------------------- what engines say of themselves

    def on_up(self, rank: int) -> None:
        """Those who wait for an engine go there."""
        self._fleet.restore(rank)
        for routed in list(self._placements.values()):
            if routed.engine is None:
                self._place_again(routed)

    def on_report(self, rank: int, load: LoadReport, stats: EngineStats | None) -> None:
        """Take it in."""
        self.loads[rank] = load
        if stats is not None:
            self.stats[rank] = stats
            self.recent_steps[rank].extend(stats.recent_steps)
        self._fleet.observe(rank, load, time.monotonic())
        for request_id in load.begun:
            if request_id in self._placements:
                self._placements[request_id].has_begun = True
        self._metrics.observe_load(rank, load, stats)

    def on_down(self, rank: int, error: StencilError) -> None:
        """Send nothing there."""
        if self._fleet.is_alive[rank] and self._models and not self._is_stopping:
            logger.error("engine %d is gone: %s", rank, error, extra=of_request(""))
        if self._fleet.is_alive[rank]:
            self._note_bystanders(rank)
        self._fleet.lose(rank)
        self.loads[rank] = self.stats[rank] = None
        self._metrics.observe_lost(rank)

    def _note_bystanders(self, rank: int) -> None:
        """An engine that is killed names nobody: of those that were there, who had been begun may have done it. If
        nobody was reported to have been, each may."""
        here = [routed for routed in self._placements.values() if routed.engine == rank]
        if any(routed.has_begun for routed in here):
            for routed in here:
                routed.is_bystander = not routed.has_begun

    def on_restart(self, rank: int) -> None:
        """Count it."""
        self._metrics.observe_restart(rank)

    def on_given_up(self, rank: int) -> None:
        """With the last engine, those who wait for one are told."""
        error = self.error
        if error is None:
            return
        failure = Failure.of(EngineDeadError(str(error)))
        for request_id, routed in list(self._placements.items()):
            if routed.engine is None:
                self._end(routed, Failed(request_id=request_id, failure=failure))

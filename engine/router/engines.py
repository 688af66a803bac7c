"""Engines: the engines of an API server: starts, restarts, adds and ends them, and knows what each has told.

Each is managed by an EngineReplica. What the Router plans with, the model of their load, is in core/routing/fleet.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from core.config import CacheConfig, StencilConfig
from core.costs.load_report import EngineStats, LoadReport, StepSample
from core.errors import ConfigError, EngineDeadError, ModelUnavailableError, StencilError
from core.ipc.logs import of_request
from core.model_info import ModelInfo
from core.routing.fleet import Fleet
from core.routing.placement import EnginePlace
from core.scheduling.reports.reporter import MAX_RECENT_STEPS
from engine.observability.metrics import Metrics
from engine.router.additions import Additions
from engine.router.cluster_follower import ClusterFollower
from engine.router.engine_backend import Cluster, EngineBackend, MachineLink
from engine.router.engine_replica import MAKE_ALIKE, EngineReplica, ReplicaState

logger = logging.getLogger("stencil.router")


class EnginesWatcher(Protocol):
    """Callbacks of the engines; implemented by `engine.router.router.Router`. They must not block or raise."""

    def on_free(self) -> None:
        """An engine takes requests that took none before."""

    def on_begun(self, request_ids: Iterable[str]) -> None:
        """Workers have begun these requests."""

    def on_lost(self, rank: int) -> None:
        """An engine has died. Called once for a death, before any of its requests fails."""

    def on_unserved(self) -> None:
        """Models may not be served any more, see `Engines.error_of`."""


@dataclass(slots=True)
class _Reported:
    """What an engine has told. load, stats: last; None: nothing yet, or it has died since."""

    load: LoadReport | None = None
    stats: EngineStats | None = None
    steps: deque[StepSample] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_STEPS))


class Engines:
    """Called in this order: start, ready, stop, close. The owner runs `run` as a task. An engine's rank is its number.

    fleet: the model of their load. models: name -> info, once they are ready. replicas: by rank.
    """

    def __init__(
        self,
        config: StencilConfig,
        backend: EngineBackend,
        metrics: Metrics,
        watcher: EnginesWatcher,
        cluster: Cluster | None = None,
    ) -> None:
        """cluster: whose machines have as many engines as they have room for, if their number follows it."""
        size = config.engine.most_engines
        self._config, self._backend, self._cluster = config.engine, backend, cluster
        self._metrics, self._watcher = metrics, watcher
        ranks = range(size if cluster is None else 0)
        self.replicas = {rank: EngineReplica(config.engine.of_engine(rank), backend, self) for rank in ranks}
        self._reported = {rank: _Reported() for rank in ranks}  # by rank, as those above
        self._runs: dict[int, asyncio.Task[None]] = {}  # engine that was added -> the task that runs it
        self._like: EngineReplica | None = None  # the first that served, which those that are added have to be like
        self.additions = Additions(self.replicas.values())
        self.models: dict[str, ModelInfo] = {}
        self._names = [model.name for model in config.engine.models]
        served = [replica.model_names for replica in self.replicas.values()]
        self.fleet = Fleet(size, config.engine.scheduler.max_num_seqs, served if config.engine.engines else ())
        for rank in range(size):
            if rank not in self.replicas:
                self.fleet.lose(rank)
        self._stopping = asyncio.Event()
        self._failure: StencilError | None = None  # why there are no engines, if there are none for good
        self._has_begun, self._has_failed = asyncio.Event(), asyncio.Event()  # the first engine serves; see `failed`

    # ---------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Have the first engine started; the others follow, see `_follow`. Raises ConfigError."""
        if self._cluster is None:
            self.replicas[0].start()

    async def run(self) -> None:
        """Run all engines until the last one is given up."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            if self._cluster is not None:
                tasks.create_task(self._follow_cluster(self._cluster))
            for replica in self.replicas.values():
                tasks.create_task(self._run_engine(replica), name=f"engine-{replica.rank}")

    async def _follow_cluster(self, cluster: Cluster) -> None:
        try:
            await ClusterFollower(cluster, self, self._stopping).run()
        except StencilError as error:
            self.fail(error)

    async def _run_engine(self, replica: EngineReplica) -> None:
        if replica.rank == 0 or await self._follow(replica):
            await replica.run()

    async def _follow(self, replica: EngineReplica) -> bool:
        """Start an engine once those that measure costs are ready, which must not be disturbed: of the engines with
        one first model, the first one, whose measurements the others read. Returns False if one of these did not start
        or all are being stopped.
        """
        first: dict[str, EngineReplica] = {}  # model -> the engine that measures it
        for each in self.replicas.values():
            first.setdefault(each.model_names[0], each)
        measuring = list(first.values())
        before = measuring[: measuring.index(replica)] if replica in measuring else measuring
        try:
            for each in before:
                await each.ready()
            if not self._stopping.is_set():
                replica.start()
                return True
        except StencilError as error:
            replica.give_up(error)
        replica.give_up(EngineDeadError("the engine was not started"))
        return False

    async def ready(self) -> dict[str, ModelInfo]:
        """Wait until every engine serves, or any, if their number follows a cluster; model name -> info, of the models
        and then of their adapters. Raises the error that kept an engine from starting.
        """
        found: dict[str, ModelInfo] = {}
        waited_for = self.replicas.values() if self._cluster is None else [await self._first()]
        for models in await asyncio.gather(*(replica.ready() for replica in waited_for)):
            if any(found.setdefault(name, info) != info for name, info in models.items()):
                raise ConfigError(f"the engines do not serve the same models in the same way; {MAKE_ALIKE}")
        adapters = [name for name in found if name not in self._names]  # of each model in their order
        adapters.sort(key=lambda name: self._names.index(found[name].parent))
        self.models = {name: found[name] for name in (*self._names, *adapters)}
        return self.models

    async def _first(self) -> EngineReplica:
        """The first engine of a cluster that serves. Raises why there will be none."""
        await self._has_begun.wait()
        if self._like is None:
            raise await self.failed()
        return self._like

    @property
    def cache(self) -> CacheConfig:
        """Limits of cached pages; once the engines are ready, with the least device memory of any of them. Engines that
        join later have these limits, too."""
        replicas = self.replicas.values() if self._like is None else [self._like]
        return min((replica.cache for replica in replicas), key=lambda cache: cache.device_bytes or 0)

    async def failed(self) -> StencilError:
        """Wait until the last engine is given up and return the reason."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    def fail(self, error: StencilError) -> None:
        """Give up all engines, which fails all requests."""
        self._note_failed(error)
        for replica in list(self.replicas.values()):
            replica.give_up(error)

    def _note_failed(self, error: StencilError) -> None:
        """Start no more engines, and have those go on who wait for one, which includes requests."""
        self._failure = self._failure or error
        for event in (self._stopping, self._has_failed, self._has_begun):
            event.set()
        self._watcher.on_unserved()

    async def stop(self) -> None:
        """Have all engines abort their requests and end."""
        self._stopping.set()
        await asyncio.gather(*(replica.stop() for replica in self.replicas.values()))

    async def close(self) -> None:
        """Kill all engines that still run, fail all requests and close the sockets."""
        self._stopping.set()
        for replica in list(self.replicas.values()):
            await replica.close()
        self._note_failed(EngineDeadError("the server has stopped"))
        await self._backend.close()

    # ---------------------------------------------------------------------------------- state

    @property
    def error(self) -> StencilError | None:
        """Why nothing is served any more; None until the last engine is given up."""
        return self._failure

    @property
    def is_stopping(self) -> bool:
        """Whether no engine is started any more."""
        return self._stopping.is_set()

    def _staying(self) -> list[EngineReplica]:
        """All engines but those that end because their machine leaves, by rank."""
        return [self.replicas[rank] for rank in self.ranks if not self.replicas[rank].is_leaving]

    @property
    def ranks(self) -> list[int]:
        """The numbers of all engines. The lists that follow have an entry for each of them."""
        return sorted(self.replicas)

    @property
    def loads(self) -> list[LoadReport | None]:
        """The last report of each engine; None before the first, and after its death."""
        return [self._reported[rank].load for rank in self.ranks]

    @property
    def stats(self) -> list[EngineStats | None]:
        """The last statistics likewise."""
        return [self._reported[rank].stats for rank in self.ranks]

    @property
    def recent_steps(self) -> list[Sequence[StepSample]]:
        """The last denoising steps of each engine, at most MAX_RECENT_STEPS, the oldest first."""
        return [self._reported[rank].steps for rank in self.ranks]

    @property
    def links(self) -> list[MachineLink | None]:
        """The way to each engine; None: it is of this machine, or of none yet."""
        return [self.replicas[rank].link for rank in self.ranks]

    @property
    def alive(self) -> list[bool]:
        """For each engine, whether it serves; False from the first sign of its death, even if it runs, and while none
        of its workers lives.
        """
        return [self._is_up(self.replicas[rank]) for rank in self.ranks]

    @property
    def is_ready(self) -> bool:
        """Whether at least one engine serves."""
        return any(self.alive)

    def _is_up(self, replica: EngineReplica) -> bool:
        return replica.is_alive and bool(self.fleet.is_alive[replica.rank])

    @property
    def states(self) -> list[tuple[ReplicaState, int]]:
        """State and number of restarts in a row of each engine."""
        replicas = [self.replicas[rank] for rank in self.ranks]
        return [
            ("restarting" if each.state == "serving" and not self._is_up(each) else each.state, each.num_restarts)
            for each in replicas
        ]

    def is_served(self, model: str) -> bool:
        """Whether an engine that serves this model is up; "": any engine."""
        return any(self._is_up(replica) for replica in self._serving(model))

    def _serving(self, model: str) -> list[EngineReplica]:
        return [replica for replica in self._staying() if not model or model in replica.model_names]

    def error_of(self, model: str) -> StencilError | None:
        """Why a model is not served any more; None while an engine that serves it may come up; "": any engine."""
        if (error := self.error) is not None:
            return EngineDeadError(str(error))
        serving = self._serving(model)
        if self._cluster is not None or any(replica.error is None for replica in serving):
            return None
        return ModelUnavailableError(f"no engine is left that serves {model}: {serving[-1].error}")

    # ---------------------------------------------------------------------------------- callbacks of the replicas

    def on_up(self, rank: int) -> None:
        """Send requests to it, after the adapters and workflows that they may use."""
        replica = self.replicas[rank]
        if self._cluster is not None and self._like is None:
            self._note_first(replica)
        if replica.is_draining or replica.is_leaving:
            return
        self.additions.restore(replica)
        self.fleet.restore(rank)
        self._watcher.on_free()

    def _note_first(self, replica: EngineReplica) -> None:
        """Have all other engines of the cluster be like the first that serves: one that waited for room when that was
        started does not know it, and starts again."""
        self._like = replica
        self._has_begun.set()
        for each in self._staying():
            if each.state == "loading":
                self.end_engine(each.rank, "it starts again, to be like the first one")

    def on_report(self, rank: int, load: LoadReport, stats: EngineStats | None) -> None:
        """Take over an engine's load and statistics."""
        reported = self._reported[rank]
        reported.load = load
        if stats is not None:
            reported.stats = stats
            reported.steps.extend(stats.recent_steps)
        was_candidate = self.fleet.is_alive[rank]
        if (link := self.replicas[rank].link) is not None:
            self.fleet.note_link(rank, link.byte_seconds)
        self.fleet.observe(rank, load, time.monotonic())
        self._watcher.on_begun(load.begun)
        self._metrics.observe_load(rank, load, stats)
        if self.fleet.is_alive[rank] and not was_candidate:  # one of its workers lives again
            self._watcher.on_free()

    def on_down(self, rank: int, error: StencilError) -> None:
        """Send no requests to an engine that has died. Called more than once for a death."""
        if not self.fleet.has_lost(rank):
            if self.models and not self._stopping.is_set() and not self.replicas[rank].is_leaving:
                logger.error("engine %d is gone: %s", rank, error, extra=of_request(""))
            self._watcher.on_lost(rank)
        self.fleet.lose(rank)
        reported = self._reported[rank]
        reported.load = reported.stats = None
        self._metrics.observe_lost(rank)

    def on_restart(self, rank: int) -> None:
        """Count the restart."""
        self._metrics.observe_restart(rank)

    def on_given_up(self, rank: int) -> None:
        """Fail the requests that wait for an engine, of models for which this was the last one. An engine that leaves a
        cluster, or is about to, is not: another machine may come.
        """
        errors, replica = [each.error for each in self._staying() if each.error is not None], self.replicas[rank]
        if len(errors) == len(self._staying()) and not (replica.is_leaving or replica.is_draining):
            self._note_failed(errors[-1])
        self._watcher.on_unserved()

    # ---------------------------------------------------------------------------------- engines of a cluster

    def placed(self) -> dict[int, EnginePlace]:
        """See PlacedEngines."""
        return {each.rank: each.place for each in self._staying()}

    @property
    def room(self) -> int:
        """See PlacedEngines."""
        return self._config.most_engines - len(self.replicas)

    def add_engine(self, machine: str) -> int:
        """See PlacedEngines. It has to serve what the first one serves."""
        rank = next(rank for rank in range(self._config.most_engines) if rank not in self.replicas)
        config = msgspec.structs.replace(self._config.of_engine(rank), machine=machine)
        replica = self.replicas[rank] = EngineReplica(config, self._backend, self, self._like)
        self._reported[rank] = _Reported()
        self._metrics.expect_engine(rank)
        self._runs[rank] = self._tasks.create_task(self._run_added(replica), name=f"engine-{rank}")
        return rank

    async def _run_added(self, replica: EngineReplica) -> None:
        if self._stopping.is_set():
            return replica.give_up(EngineDeadError("the engine was not started"))
        try:
            replica.start()
        except StencilError as error:
            return replica.give_up(error)
        await replica.run()

    def drain_engine(self, number: int) -> None:
        """See PlacedEngines."""
        self.replicas[number].is_draining = True
        self.fleet.close(number)

    def end_engine(self, number: int, why: str) -> None:
        """See PlacedEngines."""
        self.replicas[number].is_leaving = True
        self.fleet.close(number)
        self._tasks.create_task(self._end_engine(number, why), name=f"end-engine-{number}")

    async def _end_engine(self, number: int, why: str) -> None:
        replica = self.replicas[number]
        await replica.leave(why)
        await self._runs.pop(number)
        await replica.close()
        self.fleet.lose(number)
        del self.replicas[number], self._reported[number]
        self._metrics.forget_engine(number)
        logger.info("engine %d has ended: %s", number, why, extra=of_request(""))

"""Router: sends every request of the API server to one of its N engines and passes on the outputs.

If an engine dies, its requests are sent to another one, or wait until one is up again: the same message, so the same
picture. The model of the engines' load and the choice of an engine are in core/routing/ (fleet.py, policies.py); the
engines are managed by EngineReplica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from core.config import CacheConfig, StencilConfig
from core.costs.load_report import EngineStats, LoadReport, StepSample
from core.errors import ConfigError, EngineDeadError, MessageError, ModelUnavailableError, StencilError
from core.failure import NEVER_BEGUN, Failure
from core.graph.catalog import with_registered, with_variants
from core.ipc.logs import of_request
from core.late_adapters import LateAdapters
from core.messages.engine import (
    Aborted,
    AdaptersUsed,
    DropTemplate,
    EngineRequest,
    Failed,
    Finished,
    PartialImage,
    PrimeTemplate,
    UseAdapters,
)
from core.messages.specs import RunSpec
from core.messages.worker import DropWorkflow, LoadWorkflow
from core.model_info import ModelInfo
from core.patches import PatchSet
from core.routing.admission import Outlook
from core.routing.fleet import Fleet
from core.routing.placement import EnginePlace, PlaceState
from core.routing.policies import make_policy, outlook, work_seconds
from core.routing.request_shape import RequestShape
from core.scheduling.reports.reporter import MAX_RECENT_STEPS
from engine.observability.metrics import Metrics
from engine.router.additions import Additions
from engine.router.cluster_follower import ClusterFollower
from engine.router.engine_backend import Cluster, EngineBackend, MachineLink
from engine.router.engine_client import RequestOutput, Waiter
from engine.router.engine_replica import EngineReplica, ReplicaState

logger = logging.getLogger("stencil.router")


@dataclass(slots=True)
class RoutedRequest:
    """The state of a request from submission to its terminal output.

    engine: the engine that has it; None while it waits for one to be up. sent: when it was sent there, seconds of
    CLOCK_MONOTONIC; predicted_seconds: its predicted time from then on.
    """

    message: EngineRequest | PrimeTemplate
    waiter: Waiter
    engine: int | None = None
    sent: float = 0.0
    predicted_seconds: float | None = None
    has_begun: bool = False  # a worker of that engine has begun it
    is_bystander: bool = False  # that engine died while other requests had begun, and this one had not
    num_deaths: int = 0  # engine deaths that it may have caused
    was_retried: bool = False  # sent again after an engine's death, whatever the cause
    is_aborted: bool = False  # its caller does not want it any more
    partials_delivered: set[int] = field(default_factory=set)  # indices of the partial images delivered

    def use_adapters(self, patches: PatchSet) -> None:
        """Have the request, if it is sent again, begin with its late adapters loaded. patches: all of its adapters."""
        self._replace(lambda late: msgspec.structs.replace(late, are_loaded=True), patches=patches)

    def note_adapters(self, step: int) -> None:
        """Have it repeat the step from which on it has them."""
        self._replace(lambda late: msgspec.structs.replace(late, least=step, most=step))

    def note_shown(self, step: int) -> None:
        """Have it repeat what a preview has shown: so many steps, without its late adapters unless they were noted."""
        self._replace(lambda late: msgspec.structs.replace(late, least=max(late.least, min(late.most, step))))

    def _replace(self, change: Callable[[LateAdapters], LateAdapters], **changes: PatchSet) -> None:
        """Change what is sent again of late adapters, if it has some."""
        message = self.message
        if isinstance(message, EngineRequest) and message.spec.late is not None:
            spec = msgspec.structs.replace(message.picture, late=change(message.spec.late), **changes)
            self.message = msgspec.structs.replace(message, spec=spec)


@dataclass(slots=True)
class _Reported:
    """What an engine has told. load, stats: last; None: nothing yet, or it has died since."""

    load: LoadReport | None = None
    stats: EngineStats | None = None
    steps: deque[StepSample] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_STEPS))


class Router:
    """Called in this order: start, ready, submit and abort, stop, close. The owner runs `run` as a task."""

    def __init__(
        self, config: StencilConfig, backend: EngineBackend, metrics: Metrics, cluster: Cluster | None = None
    ) -> None:
        """cluster: whose machines have as many engines as they have room for, if their number follows it."""
        size = config.engine.most_engines
        self._config, self._backend, self._cluster = config.engine, backend, cluster
        ranks = range(size if cluster is None else 0)
        self._replicas = {rank: EngineReplica(config.engine.of_engine(rank), backend, self) for rank in ranks}
        self._reported = {rank: _Reported() for rank in ranks}  # by engine, as those above
        self._runs: dict[int, asyncio.Task[None]] = {}  # engine that was added -> the task that runs it
        self._like: EngineReplica | None = None  # the first that served, which those that are added have to be like
        self.additions = Additions(self._replicas.values())
        self._models: dict[str, ModelInfo] = {}
        self._names = [model.name for model in config.engine.models]
        served = [replica.model_names for replica in self._replicas.values()]
        self._fleet = Fleet(size, config.engine.scheduler.max_num_seqs, served if config.engine.engines else ())
        for rank in range(size):
            if rank not in self._replicas:
                self._fleet.lose(rank)
        classes = {each.name for each in config.engine.classes}
        self._workflows = with_registered(config.engine.workflows, classes)
        self._roles: dict[str, dict[str, str]] = {}  # workflow that was added -> its model's roles with it
        self._policy = make_policy(config.router_policy)
        self._max_retries = config.engine.scheduler.max_retries
        self._metrics = metrics
        self._stopping = asyncio.Event()
        self._failure: StencilError | None = None  # why there are no engines, if there are none for good
        self._has_begun, self._has_failed = asyncio.Event(), asyncio.Event()  # the first engine serves; see `failed`
        self._placements: dict[str, RoutedRequest] = {}  # by request id, until the terminal output

    # ---------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Have the first engine started; the others follow, see `_follow`. Raises ConfigError."""
        if self._cluster is None:
            self._replicas[0].start()

    async def run(self) -> None:
        """Run all engines until the last one is given up."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            if self._cluster is not None:
                tasks.create_task(self._follow_cluster(self._cluster))
            for replica in self._replicas.values():
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
        or the router is stopping.
        """
        first: dict[str, EngineReplica] = {}  # model -> the engine that measures it
        for each in self._replicas.values():
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
        waited_for = self._replicas.values() if self._cluster is None else [await self._first()]
        for models in await asyncio.gather(*(replica.ready() for replica in waited_for)):
            if any(found.setdefault(name, info) != info for name, info in models.items()):
                raise ConfigError(
                    "the engines do not serve the same models in the same way; give all of them one type of device, or "
                    "of CPU and one C compiler"
                )
        adapters = [name for name in found if name not in self._names]  # of each model in their order
        adapters.sort(key=lambda name: self._names.index(found[name].parent))
        self._models = {name: found[name] for name in (*self._names, *adapters)}
        return self._models

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
        replicas = self._replicas.values() if self._like is None else [self._like]
        return min((replica.cache for replica in replicas), key=lambda cache: cache.device_bytes or 0)

    async def failed(self) -> StencilError:
        """Wait until the last engine is given up and return the reason."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    def fail(self, error: StencilError) -> None:
        """Give up all engines, which fails all requests."""
        self._note_failed(error)
        for replica in list(self._replicas.values()):
            replica.give_up(error)

    def _note_failed(self, error: StencilError) -> None:
        """Start no more engines, and have those go on who wait for one, which includes requests."""
        self._failure = self._failure or error
        for event in (self._stopping, self._has_failed, self._has_begun):
            event.set()
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        """Fail the requests that wait for an engine, of models that are not served any more."""
        for request_id, routed in list(self._placements.items()):
            if routed.engine is None and (error := self.error_of(routed.message.model)) is not None:
                self._end(routed, Failed(request_id=request_id, failure=Failure.of(error)))

    async def stop(self) -> None:
        """Abort all requests and end all engines."""
        self._stopping.set()
        self.abort([request_id for request_id, routed in self._placements.items() if routed.engine is None])
        await asyncio.gather(*(replica.stop() for replica in self._replicas.values()))

    async def close(self) -> None:
        """Kill all engines that still run, fail all requests and close the sockets."""
        self._stopping.set()
        for replica in list(self._replicas.values()):
            await replica.close()
        self._note_failed(EngineDeadError("the server has stopped"))
        await self._backend.close()

    # ---------------------------------------------------------------------------------- state

    @property
    def error(self) -> StencilError | None:
        """Why nothing is served any more; None until the last engine is given up."""
        return self._failure

    def _staying(self) -> list[EngineReplica]:
        """All engines but those that end because their machine leaves, by number."""
        return [self._replicas[rank] for rank in self.engines if not self._replicas[rank].is_leaving]

    @property
    def engines(self) -> list[int]:
        """The numbers of all engines. What follows has an entry for each of them."""
        return sorted(self._replicas)

    @property
    def loads(self) -> list[LoadReport | None]:
        """The last report of each engine; None before the first, and after its death."""
        return [self._reported[rank].load for rank in self.engines]

    @property
    def stats(self) -> list[EngineStats | None]:
        """The last statistics likewise."""
        return [self._reported[rank].stats for rank in self.engines]

    @property
    def recent_steps(self) -> list[Sequence[StepSample]]:
        """The last denoising steps of each engine, at most MAX_RECENT_STEPS, the oldest first."""
        return [self._reported[rank].steps for rank in self.engines]

    @property
    def links(self) -> list[MachineLink | None]:
        """The way to each engine; None: it is of this machine, or of none yet."""
        return [self._replicas[rank].link for rank in self.engines]

    @property
    def is_ready(self) -> bool:
        """Whether at least one engine serves."""
        return any(self.alive)

    @property
    def alive(self) -> list[bool]:
        """For each engine, whether it serves; False from the first sign of its death, even if it runs, and while none
        of its workers lives.
        """
        return [self._is_up(self._replicas[rank]) for rank in self.engines]

    def _is_up(self, replica: EngineReplica) -> bool:
        return replica.is_alive and bool(self._fleet.is_alive[replica.rank])

    @property
    def replicas(self) -> list[tuple[ReplicaState, int]]:
        """State and number of restarts in a row of each engine."""
        replicas = [self._replicas[rank] for rank in self.engines]
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

    @property
    def drain_seconds(self) -> float:
        """Predicted seconds until the first engine has done all of its requests."""
        return min((load.drain_seconds for load in self.loads if load is not None), default=0.0)

    @property
    def num_running(self) -> int:
        return sum(load.num_running for load in self.loads if load is not None)

    @property
    def num_waiting(self) -> int:
        """Requests queued in the engines, or waiting for an engine to be up."""
        num_unplaced = sum(routed.engine is None for routed in self._placements.values())
        return num_unplaced + sum(load.num_waiting for load in self.loads if load is not None)

    def has_begun(self, request_id: str) -> bool:
        """Whether a worker has begun a request, or it has ended."""
        routed = self._placements.get(request_id)
        return routed is None or routed.has_begun

    def outlook(self, shape: RequestShape) -> Outlook | None:
        """The prediction for an edit submitted now; None before an engine has reported costs, or if none is alive that
        serves its model.
        """
        if not self._fleet.num_serving(shape.model):
            return None
        return outlook(shape, self._fleet, self._policy, time.monotonic())

    def work_seconds(self, shape: RequestShape) -> float:
        """Seconds by which an edit delays the end of all work, spread over the ranks that serve its model."""
        return work_seconds(shape, self._fleet) / max(1, self._fleet.num_lanes_serving(shape.model))

    def engine_of(self, request_id: str) -> int | None:
        """The engine that has a request, also during the callback for its terminal output; None while it has none."""
        routed = self._placements.get(request_id)
        return routed.engine if routed else None

    def was_retried(self, request_id: str) -> bool:
        """Whether a request was sent again after its engine died; known until the callback for its terminal output."""
        routed = self._placements.get(request_id)
        return routed is not None and routed.was_retried

    # ---------------------------------------------------------------------------------- messages

    def submit(self, request: EngineRequest | PrimeTemplate, waiter: Waiter) -> None:
        """Send a request to an engine; `waiter` is called with every output, the last one terminal. Raises
        EngineDeadError if all engines are given up, ModelUnavailableError if all that serve its model are, MessageError
        for a request that cannot be encoded; it is not kept then.
        """
        if (error := self.error_of(request.model)) is not None:
            raise error
        routed = self._placements[request.request_id] = RoutedRequest(request, waiter)
        try:
            self._place(routed)
        except BaseException:
            del self._placements[request.request_id]
            raise

    def drop(self, template: DropTemplate) -> None:
        """Have every engine that serves its model drop a template's pages."""
        for replica in self._replicas.values():
            if template.model in replica.model_names:
                replica.drop(template)

    async def add_workflow(self, load: LoadWorkflow) -> None:
        """Have all engines take a workflow in use, see `Additions.load_workflow`, whose errors it raises."""
        await self.additions.load_workflow(load)
        variants = {each.name: each for each in with_variants(load.workflow)}
        self._workflows |= variants
        if load.model:
            self._roles |= dict.fromkeys(variants, load.roles)

    def drop_workflow(self, drop: DropWorkflow) -> None:
        """Forget a workflow that no request has any more, and have all engines free what its classes have."""
        self.additions.remove(drop)
        if (gone := self._workflows.get(drop.name)) is not None:
            for each in with_variants(gone):
                del self._workflows[each.name]
                self._roles.pop(each.name, None)
            named = frozenset[str]().union(*(workflow.class_names for workflow in self._workflows.values()))
            self._fleet.forget_classes(gone.class_names - named)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests. The terminal output of each still follows, at once if no engine has the request."""
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

    def use_adapters(self, request_ids: Iterable[str], patches: PatchSet) -> None:
        """Note that the late adapters of requests are loaded. patches: all adapters of each. Requests that have ended
        have no use for them.
        """
        for request_id in request_ids:
            if (routed := self._placements.get(request_id)) is None:
                continue
            routed.use_adapters(patches)
            if routed.engine is not None:
                self._replicas[routed.engine].use_adapters(UseAdapters(request_id=request_id, patches=patches))

    def _place(self, routed: RoutedRequest) -> None:
        """Send a request to the engine that the policy chooses; it waits if none is alive that serves its model."""
        shape = self._shape(routed.message)
        routed.has_begun = routed.is_bystander = False
        while self._fleet.num_serving(shape.model):
            now = time.monotonic()
            choice = self._policy.choose(shape, self._fleet.serving(shape.model, now), now)
            try:
                self._replicas[choice.engine].submit(routed.message, partial(self._on_output, choice.engine))
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
        """As `_place`, after `submit` has returned: an error becomes a Failed output."""
        try:
            self._place(routed)
        except MessageError as error:
            self._end(routed, Failed(request_id=routed.message.request_id, failure=Failure.of(error)))

    def _shape(self, request: EngineRequest | PrimeTemplate) -> RequestShape:
        if isinstance(request, EngineRequest) and isinstance(request.spec, RunSpec):
            return RequestShape.of_run(request, self._workflows[request.workflow])
        info = self._models[request.model]
        if isinstance(request, PrimeTemplate):
            return RequestShape.of_template(request, info)
        if (roles := self._roles.get(request.workflow)) is not None:
            info = msgspec.structs.replace(info, roles=roles)
        return RequestShape.of_request(request, info, self._workflows)

    def _on_output(self, engine: int, output: RequestOutput) -> None:
        routed = self._placements[output.request_id]
        match output:
            case PartialImage():
                routed.note_shown(output.step)
                if output.index not in routed.partials_delivered:
                    routed.partials_delivered.add(output.index)
                    routed.waiter(output)
            case AdaptersUsed():
                routed.note_adapters(output.step)
            case Failed(failure=Failure(kind="engine_dead") as failure):
                self.on_down(engine, EngineDeadError(failure.message))
                self._retry(routed, failure)
            case _:
                if isinstance(output, Finished) and routed.predicted_seconds is not None:
                    seconds = time.monotonic() - routed.sent
                    self._metrics.observe_prediction(routed.predicted_seconds, seconds)
                self._end(routed, output)

    def _end(self, routed: RoutedRequest, output: RequestOutput) -> None:
        """Deliver a terminal output and forget the request."""
        routed.waiter(output)
        del self._placements[output.request_id]

    def _retry(self, routed: RoutedRequest, failure: Failure) -> None:
        """Send a request again after its engine died, unless it was aborted, or no retry or no engine is left."""
        request_id = routed.message.request_id
        routed.num_deaths += failure.code != NEVER_BEGUN and not routed.is_bystander
        if routed.is_aborted:
            self._end(routed, Aborted(request_id=request_id))
        elif self._stopping.is_set() or self.error is not None:
            self._end(routed, Failed(request_id=request_id, failure=failure))
        elif (error := self.error_of(routed.message.model)) is not None:
            self._end(routed, Failed(request_id=request_id, failure=Failure.of(error)))
        elif routed.num_deaths > self._max_retries:
            times = f"{routed.num_deaths} engines" if routed.num_deaths > 1 else "The engine"
            message = f"{times} died while running this request (retries allowed: {self._max_retries}): "
            given_up = Failure("engine_dead", message + failure.message)
            logger.error("%s", given_up.message, extra=of_request(request_id))
            self._end(routed, Failed(request_id=request_id, failure=given_up))
        else:
            self._metrics.observe_retried()
            routed.was_retried = True
            if isinstance(routed.message, EngineRequest):
                routed.message = msgspec.structs.replace(routed.message, num_deaths=routed.num_deaths)
            self._place_again(routed)

    # ---------------------------------------------------------------------------------- callbacks of the replicas

    def on_up(self, rank: int) -> None:
        """Send it the requests that wait for an engine, after the adapters and workflows that they may use."""
        replica = self._replicas[rank]
        if self._cluster is not None and self._like is None:
            self._note_first(replica)
        if replica.is_draining or replica.is_leaving:
            return
        self.additions.restore(replica)
        self._fleet.restore(rank)
        self._place_waiting()

    def _note_first(self, replica: EngineReplica) -> None:
        """Have all other engines of the cluster be like the first that serves: one that waited for room when that was
        started does not know it, and starts again."""
        self._like = replica
        self._has_begun.set()
        for each in self._staying():
            if each.state == "loading":
                self.end_engine(each.rank, "it starts again, to be like the first one")

    def _place_waiting(self) -> None:
        for routed in list(self._placements.values()):
            if routed.engine is None:
                self._place_again(routed)

    def on_report(self, rank: int, load: LoadReport, stats: EngineStats | None) -> None:
        """Take over an engine's load and statistics."""
        reported = self._reported[rank]
        reported.load = load
        if stats is not None:
            reported.stats = stats
            reported.steps.extend(stats.recent_steps)
        was_candidate = self._fleet.is_alive[rank]
        if (link := self._replicas[rank].link) is not None:
            self._fleet.note_link(rank, link.byte_seconds)
        self._fleet.observe(rank, load, time.monotonic())
        for request_id in load.begun:
            if request_id in self._placements:
                self._placements[request_id].has_begun = True
        self._metrics.observe_load(rank, load, stats)
        if self._fleet.is_alive[rank] and not was_candidate:  # one of its workers lives again
            self._place_waiting()

    def on_down(self, rank: int, error: StencilError) -> None:
        """Send no requests to an engine that has died. Called more than once for a death."""
        if not self._fleet.has_lost(rank):
            if self._models and not self._stopping.is_set() and not self._replicas[rank].is_leaving:
                logger.error("engine %d is gone: %s", rank, error, extra=of_request(""))
            self._note_bystanders(rank)
        self._fleet.lose(rank)
        reported = self._reported[rank]
        reported.load = reported.stats = None
        self._metrics.observe_lost(rank)

    def _note_bystanders(self, rank: int) -> None:
        """Decide which requests may have caused an engine's death, which it does not report: those that had begun, or
        all that it had if none was reported to have begun. The others are bystanders."""
        here = [routed for routed in self._placements.values() if routed.engine == rank]
        if any(routed.has_begun for routed in here):
            for routed in here:
                routed.is_bystander = not routed.has_begun

    def on_restart(self, rank: int) -> None:
        """Count the restart."""
        self._metrics.observe_restart(rank)

    def on_given_up(self, rank: int) -> None:
        """Fail the requests that wait for an engine, of models for which this was the last one. An engine that leaves a
        cluster is not: another machine may come.
        """
        errors = [each.error for each in self._staying() if each.error is not None]
        if len(errors) == len(self._staying()) and not self._replicas[rank].is_leaving:
            self._note_failed(errors[-1])
        self._fail_waiting()

    # ---------------------------------------------------------------------------------- engines of a cluster

    def placed(self) -> dict[int, EnginePlace]:
        """See PlacedEngines."""
        return {each.rank: EnginePlace(each.machine, _placed_state(each), each.is_idle) for each in self._staying()}

    @property
    def room(self) -> int:
        """See PlacedEngines."""
        return self._config.most_engines - len(self._replicas)

    def add_engine(self, machine: str) -> int:
        """See PlacedEngines. It has to serve what the first one serves."""
        rank = next(rank for rank in range(self._config.most_engines) if rank not in self._replicas)
        config = msgspec.structs.replace(self._config.of_engine(rank), machine=machine)
        replica = self._replicas[rank] = EngineReplica(config, self._backend, self, self._like)
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
        self._replicas[number].is_draining = True
        self._fleet.close(number)

    def end_engine(self, number: int, why: str) -> None:
        """See PlacedEngines."""
        self._replicas[number].is_leaving = True
        self._fleet.close(number)
        self._tasks.create_task(self._end_engine(number, why), name=f"end-engine-{number}")

    async def _end_engine(self, number: int, why: str) -> None:
        replica = self._replicas[number]
        await replica.leave(why)
        await self._runs.pop(number)
        await replica.close()
        self._fleet.lose(number)
        del self._replicas[number], self._reported[number]
        self._metrics.forget_engine(number)
        logger.info("engine %d has ended: %s", number, why, extra=of_request(""))


def _placed_state(replica: EngineReplica) -> PlaceState:
    if replica.error is not None:
        return "gone"
    if replica.is_draining:
        return "draining"
    if replica.has_served:
        return "served"
    return "waiting" if replica.waits_for_room else "starting"

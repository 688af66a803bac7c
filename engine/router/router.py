"""Router: sends every request of the API server to one of its N engines and passes on the outputs.

If an engine dies, its requests are sent to another one, or wait until one is up again: the same message, so the same
picture. The choice of an engine is in core/routing/policies.py; Engines has the engines themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import partial

import msgspec

from core.config import StencilConfig
from core.errors import EngineDeadError, MessageError
from core.failure import NEVER_BEGUN, Failure
from core.graph.catalog import with_registered, with_variants
from core.ipc.logs import of_request
from core.messages.engine import (
    Aborted,
    AdaptersUsed,
    DropTemplate,
    EngineRequest,
    Failed,
    Finished,
    Output,
    PartialImage,
    PrimeTemplate,
    UseAdapters,
)
from core.messages.specs import RunSpec
from core.messages.worker import DropWorkflow, LoadWorkflow
from core.patches import PatchSet
from core.routing.admission import Outlook
from core.routing.policies import make_policy, outlook, work_seconds
from core.routing.request_shape import RequestShape
from engine.observability.metrics import Metrics
from engine.router.engine_backend import Cluster, EngineBackend
from engine.router.engine_client import Waiter
from engine.router.engines import Engines
from engine.router.routed_request import RoutedRequest

logger = logging.getLogger("stencil.router")


class Router:
    """Submit and abort once the engines are ready; `stop` before they are closed."""

    def __init__(
        self, config: StencilConfig, backend: EngineBackend, metrics: Metrics, cluster: Cluster | None = None
    ) -> None:
        """cluster: whose machines have as many engines as they have room for, if their number follows it."""
        self.engines = Engines(config, backend, metrics, self, cluster)
        classes = {each.name for each in config.engine.classes}
        self._workflows = with_registered(config.engine.workflows, classes)
        self._roles: dict[str, dict[str, str]] = {}  # workflow that was added -> its model's roles with it
        self._policy = make_policy(config.router_policy)
        self._max_retries = config.engine.scheduler.max_retries
        self._metrics = metrics
        self._placements: dict[str, RoutedRequest] = {}  # by request id, until the terminal output

    async def stop(self) -> None:
        """Abort all requests and end all engines, which have to be closed then."""
        self.abort([request_id for request_id, routed in self._placements.items() if routed.engine is None])
        await self.engines.stop()

    # ---------------------------------------------------------------------------------- state

    @property
    def drain_seconds(self) -> float:
        """Predicted seconds until the first engine has done all of its requests."""
        return min((load.drain_seconds for load in self.engines.loads if load is not None), default=0.0)

    @property
    def num_running(self) -> int:
        return sum(load.num_running for load in self.engines.loads if load is not None)

    @property
    def num_waiting(self) -> int:
        """Requests queued in the engines, or waiting for an engine to be up."""
        num_unplaced = sum(routed.engine is None for routed in self._placements.values())
        return num_unplaced + sum(load.num_waiting for load in self.engines.loads if load is not None)

    def has_begun(self, request_id: str) -> bool:
        """Whether a worker has begun a request, or it has ended."""
        routed = self._placements.get(request_id)
        return routed is None or routed.has_begun

    def outlook(self, shape: RequestShape) -> Outlook | None:
        """The prediction for an edit submitted now; None before an engine has reported costs, or if none is alive that
        serves its model.
        """
        if not self.engines.fleet.num_serving(shape.model):
            return None
        return outlook(shape, self.engines.fleet, self._policy, time.monotonic())

    def work_seconds(self, shape: RequestShape) -> float:
        """Seconds by which an edit delays the end of all work, spread over the ranks that serve its model."""
        return work_seconds(shape, self.engines.fleet) / max(1, self.engines.fleet.num_lanes_serving(shape.model))

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
        if (error := self.engines.error_of(request.model)) is not None:
            raise error
        routed = self._placements[request.request_id] = RoutedRequest(request, waiter)
        try:
            self._place(routed)
        except BaseException:
            del self._placements[request.request_id]
            raise

    def drop(self, template: DropTemplate) -> None:
        """Have every engine that serves its model drop a template's pages."""
        for replica in self.engines.replicas.values():
            if template.model in replica.model_names:
                replica.drop(template)

    async def add_workflow(self, load: LoadWorkflow) -> None:
        """Have all engines take a workflow in use, see `Additions.load_workflow`, whose errors it raises."""
        await self.engines.additions.load_workflow(load)
        variants = {each.name: each for each in with_variants(load.workflow)}
        self._workflows |= variants
        if load.model:
            self._roles |= dict.fromkeys(variants, load.roles)

    def drop_workflow(self, drop: DropWorkflow) -> None:
        """Forget a workflow that no request has any more, and have all engines free what its classes have."""
        self.engines.additions.remove(drop)
        if (gone := self._workflows.get(drop.name)) is not None:
            for each in with_variants(gone):
                del self._workflows[each.name]
                self._roles.pop(each.name, None)
            named = frozenset[str]().union(*(workflow.class_names for workflow in self._workflows.values()))
            self.engines.fleet.forget_classes(gone.class_names - named)

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
            self.engines.replicas[engine].abort(tuple(ids))

    def use_adapters(self, request_ids: Iterable[str], patches: PatchSet) -> None:
        """Note that the late adapters of requests are loaded. patches: all adapters of each. Requests that have ended
        have no use for them.
        """
        for request_id in request_ids:
            if (routed := self._placements.get(request_id)) is None:
                continue
            routed.use_adapters(patches)
            if routed.engine is not None:
                self.engines.replicas[routed.engine].use_adapters(UseAdapters(request_id=request_id, patches=patches))

    def _place(self, routed: RoutedRequest) -> None:
        """Send a request to the engine that the policy chooses; it waits if none is alive that serves its model."""
        shape = self._shape(routed.message)
        routed.has_begun = routed.is_bystander = False
        while self.engines.fleet.num_serving(shape.model):
            now = time.monotonic()
            choice = self._policy.choose(shape, self.engines.fleet.serving(shape.model, now), now)
            try:
                self.engines.replicas[choice.engine].submit(routed.message, partial(self._on_output, choice.engine))
            except EngineDeadError as error:  # it died a moment ago
                self.engines.on_down(choice.engine, error)
                continue
            routed.engine, routed.sent = choice.engine, now
            routed.predicted_seconds = choice.predicted_seconds
            self.engines.fleet.sent(choice.engine, shape, now)
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
        info = self.engines.models[request.model]
        if isinstance(request, PrimeTemplate):
            return RequestShape.of_template(request, info)
        if (roles := self._roles.get(request.workflow)) is not None:
            info = msgspec.structs.replace(info, roles=roles)
        return RequestShape.of_request(request, info, self._workflows)

    def _on_output(self, engine: int, output: Output) -> None:
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
                self.engines.on_down(engine, EngineDeadError(failure.message))
                self._retry(routed, failure)
            case _:
                if isinstance(output, Finished) and routed.predicted_seconds is not None:
                    seconds = time.monotonic() - routed.sent
                    self._metrics.observe_prediction(routed.predicted_seconds, seconds)
                self._end(routed, output)

    def _end(self, routed: RoutedRequest, output: Output) -> None:
        """Deliver a terminal output and forget the request."""
        routed.waiter(output)
        del self._placements[output.request_id]

    def _retry(self, routed: RoutedRequest, failure: Failure) -> None:
        """Send a request again after its engine died, unless it was aborted, or no retry or no engine is left."""
        request_id = routed.message.request_id
        routed.num_deaths += failure.code != NEVER_BEGUN and not routed.is_bystander
        if routed.is_aborted:
            self._end(routed, Aborted(request_id=request_id))
        elif self.engines.is_stopping or self.engines.error is not None:
            self._end(routed, Failed(request_id=request_id, failure=failure))
        elif (error := self.engines.error_of(routed.message.model)) is not None:
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

    # ---------------------------------------------------------------------------------- callbacks of the engines

    def on_free(self) -> None:
        """Send the requests that wait for an engine."""
        for routed in list(self._placements.values()):
            if routed.engine is None:
                self._place_again(routed)

    def on_begun(self, request_ids: Iterable[str]) -> None:
        """Note them: an engine's death may be theirs."""
        for request_id in request_ids:
            if request_id in self._placements:
                self._placements[request_id].has_begun = True

    def on_lost(self, rank: int) -> None:
        """Decide which requests may have caused an engine's death, which it does not report: those that had begun, or
        all that it had if none was reported to have begun. The others are bystanders."""
        here = [routed for routed in self._placements.values() if routed.engine == rank]
        if any(routed.has_begun for routed in here):
            for routed in here:
                routed.is_bystander = not routed.has_begun

    def on_unserved(self) -> None:
        """Fail the requests that wait for an engine, of models that are not served any more."""
        for request_id, routed in list(self._placements.items()):
            if routed.engine is None and (error := self.engines.error_of(routed.message.model)) is not None:
                self._end(routed, Failed(request_id=request_id, failure=Failure.of(error)))

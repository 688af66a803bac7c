"""ModelLoads: orders the components that requests need, and fails requests whose model cannot be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from core.costs.cost_model import CostModel
from core.failure import Failure
from core.messages.worker import ModelFailed, ModelLoaded
from core.scheduling.endings import Endings
from core.scheduling.node_cache import NodeCache
from core.scheduling.ranks.in_flight import Flight
from core.scheduling.ranks.residency import ModelOrders, Needs, Residency
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Request, Status

LoadAnswer = ModelLoaded | ModelFailed
"""A rank's answer to an order to load a component."""


@dataclass(frozen=True, slots=True)
class ModelLoads:
    """Decides for one scheduler, by its Residency."""

    residency: Residency
    requests: LiveRequests
    cache: NodeCache
    endings: Endings
    cost: CostModel

    def order(self, now: float) -> ModelOrders:
        """The components that ranks are to load and drop now."""
        if self.residency.is_complete:
            return ModelOrders()
        running = {request.needs for request in self.requests.running}
        running.update(map(self._needs_of, self.cache.models_in_use))
        return self.residency.order(running, self._waiting(now), now)

    def _needs_of(self, model: str) -> Needs:
        return self.residency.models[model].needs

    def _waiting(self, now: float) -> Iterator[tuple[Needs, float]]:
        """(needs, arrival) of waiting requests, then of the cache's jobs other than idle work."""
        for request in self.requests.live():
            if request.status is Status.WAITING:
                yield request.needs, request.head.arrival
        for job in self.cache.jobs():
            if not job.is_idle_work:
                yield self._needs_of(job.model), now

    def note_batch(self, flight: Flight) -> None:
        """Note a batch that is sent."""
        self.residency.note_use(flight.keys)

    def apply(self, answer: LoadAnswer, now: float) -> None:
        """Process a rank's answer to an order. Requests that need a component that cannot be loaded fail."""
        if isinstance(answer, ModelLoaded):
            self.residency.note_loaded(answer.rank, answer.loaded)
            self.cost.observe_load(answer.loaded.nbytes, answer.seconds)
            return
        self.residency.note_failed(answer.rank, answer.key, answer.failure, now)
        for request in list(self.requests.live()):
            if answer.key in request.needs:
                self.endings.fail(request, _unavailable(request.head.model, answer.failure))
        models = [name for name, info in self.residency.models.items() if answer.key in info.needs]
        self.cache.fail_templates({model: _unavailable(model, answer.failure) for model in models})

    def refusal(self, request: Request, now: float) -> Failure | None:
        """Why a new request fails at once; None: it does not, and what it needs is noted."""
        if (failure := self.residency.failure_of(request.needs, now)) is not None:
            return _unavailable(request.head.model, failure)
        self.residency.note_wanted(request.needs)
        return None


def _unavailable(model: str, failure: Failure) -> Failure:
    return Failure("model_unavailable", f"the model {model} cannot be loaded: {failure.message}")

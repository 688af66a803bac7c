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
from core.scheduling.ranks.residency import ModelOrders, Residency
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Status

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
        running = {request.head.model for request in self.requests.running}
        running.update(self.cache.models_in_use)
        return self.residency.order(running, self._waiting(now), now)

    def _waiting(self, now: float) -> Iterator[tuple[str, float]]:
        """(model, arrival) of waiting requests, then of the cache's jobs other than idle work."""
        for request in self.requests.live():
            if request.status is Status.WAITING:
                yield request.head.model, request.head.arrival
        for job in self.cache.jobs():
            if not job.is_idle_work:
                yield job.model, now

    def note_batch(self, flight: Flight) -> None:
        """Note a batch that is sent."""
        self.residency.note_use(flight.keys)

    def apply(self, answer: LoadAnswer, now: float) -> None:
        """Process a rank's answer to an order. Requests that need a component that cannot be loaded fail."""
        if isinstance(answer, ModelLoaded):
            self.residency.note_loaded(answer.rank, answer.loaded)
            self.cost.observe_load(answer.loaded.nbytes, answer.seconds)
            return
        models = self.residency.note_failed(answer.rank, answer.key, answer.failure, now)
        failures = {model: _unavailable(model, answer.failure) for model in models}
        for request in list(self.requests.live()):
            if request.head.model in failures:
                self.endings.fail(request, failures[request.head.model])
        self.cache.fail_templates(failures)

    def refusal(self, model: str, now: float) -> Failure | None:
        """Why a new request of a model fails at once; None: it does not."""
        failure = self.residency.failure_of(model, now)
        return None if failure is None else _unavailable(model, failure)


def _unavailable(model: str, failure: Failure) -> Failure:
    return Failure("model_unavailable", f"the model {model} cannot be loaded: {failure.message}")

"""Refusals: fails requests whose model is refused for a while, because it could not be loaded or has ended ranks."""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, field

from core.costs.load_report import QuarantineCause
from core.failure import Failure
from core.handles import ModelKey
from core.scheduling.endings import Endings
from core.scheduling.node_cache import NodeCache
from core.scheduling.ranks.in_flight import Flight
from core.scheduling.ranks.quarantine import Refusal, Suspects
from core.scheduling.ranks.residency import Residency
from core.scheduling.recovery.recovery import Blame
from core.scheduling.requests.bindings import Needs
from core.scheduling.requests.live_requests import LiveRequests

_WHY: dict[QuarantineCause, str] = {
    "load": "{} cannot be loaded",
    "deaths": "{} is not run for a while, because its batches ended workers",
    "owner_deaths": "{} is not run for this owner for a while, because its batches ended workers",
}


@dataclass(slots=True)
class Refusals:
    """The mechanism of one scheduler. now: monotonic seconds."""

    residency: Residency
    requests: LiveRequests
    cache: NodeCache
    endings: Endings
    _new: list[str] = field(default_factory=list)  # since `take_new`
    # (components, name of a model or class, why, whose requests are refused; None: everybody's) -> since when, as put
    # in `_new` last
    _told: dict[tuple[tuple[ModelKey, ...], str, QuarantineCause, str | None], float] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------- events

    def note_failed_load(self, rank: int, key: ModelKey, failure: Failure, now: float) -> None:
        """Note that a rank could not load a component."""
        self._begin(self.residency.note_failed(rank, key, failure, now), now)

    def fail_stuck(self, now: float) -> None:
        """Fail the requests that wait for what cannot be loaded now. What they need was there when they came, and has
        gone with a rank or to make room; or it was larger than predicted.
        """
        if not self.residency.has_outgrown and not self.residency.quarantine.refuses_loads(now):
            return
        for request in list(self.requests.live()):
            refusal = self.residency.refusal_of_loads(request.needs, now, self.cache.rank_of(request))
            if refusal is not None:
                self.endings.fail(request, self._failure(request.head.model, refusal, now))
        for model in self.cache.wanted_models():
            refusal = self.residency.refusal_of_loads(self.residency.priming_needs_of(model), now)
            if refusal is not None:
                self.cache.fail_templates({model: self._failure(model, refusal, now)})

    def note_death(
        self, rank: int, blame: Blame | None, loading: ModelKey | None, failure: Failure, now: float
    ) -> None:
        """Note that a rank has died that had served only briefly: what has served for longer was not ended by its
        models. blame: for the batch that it ran. loading: the component that it was loading.
        """
        begun: list[Refusal | None] = []
        if loading is not None:
            suspects = Suspects() if blame is None else blame.suspects
            begun += [self.residency.note_death_in_load(rank, loading, suspects, failure, now)]
        if blame is not None and blame.keys.keys:
            begun += self.residency.quarantine.note_death(blame.keys, blame.suspects, failure, now)
        for refusal in filter(None, begun):
            self._begin(refusal, now)

    def note_good_batch(self, flight: Flight, now: float) -> None:
        """Note a batch that has succeeded. It speaks for nothing if all of its requests have ended: a refusal may have
        failed them after it was sent.
        """
        if self.residency.quarantine.awaits_batches:
            requests = (self.requests.get(item.request_id) for item in flight.batch.items)
            owners = {each.head.owner for each in requests if each is not None and each.is_live}
            if owners or flight.job_id:
                self.residency.quarantine.note_good_batch(flight.keys, owners, now)

    def forget(self, gone: Set[ModelKey]) -> None:
        """Forget what was told of classes that nobody names any more."""
        self._told = {told: since for told, since in self._told.items() if gone.isdisjoint(told[0])}

    def _begin(self, refusal: Refusal, now: float) -> None:
        """Fail the requests and templates that are refused from now on."""
        for request in list(self.requests.live()):
            if self.residency.is_refused(refusal, request.needs, request.head.owner):
                self.endings.fail(request, self._failure(request.head.model, refusal, now))
        models = self.residency.refused(refusal)
        self.cache.fail_templates({model: self._failure(model, refusal, now) for model in models}, refusal.owner)
        steered = self.residency.steered_by(refusal.keys)
        own = (model for model in (*models, *steered) if not self.residency.models[model].parent)
        for model in (*own, *self.residency.classes_of(refusal.keys)):
            failure, told = self._failure(model, refusal, now), (refusal.keys, model, refusal.cause, refusal.owner)
            if self._told.get(told) != refusal.since:  # else another rank tells of the same try
                self._told[told] = refusal.since
                self._new.append(f"{failure.message} (for {refusal.until - now:.0f} s)")

    # ------------------------------------------------------------------------------------------------- what is asked

    def failure_of(self, model: str, needs: Needs, owner: str, now: float) -> Failure | None:
        """Why an owner's new request fails at once; None: it does not. model: of the request, "" if it has none."""
        refusal = self.residency.refusal_of_loads(needs, now)
        refusal = refusal or self.residency.quarantine.refusal_of(needs, owner, now)
        return None if refusal is None else self._failure(model, refusal, now)

    def take_new(self) -> list[str]:
        """What is refused since the last call, in words."""
        new, self._new = self._new, []
        return new

    def _failure(self, model: str, refusal: Refusal, now: float) -> Failure:
        """The failure of a request of this model. model: "": it has none."""
        what = f"{_WHY[refusal.cause].format(self._what(model, refusal.keys))}: {refusal.failure.message}"
        return Failure("model_unavailable", what, code=refusal.cause, retry_after=max(0.0, refusal.until - now))

    def _what(self, model: str, keys: Collection[ModelKey]) -> str:
        """What computes with these components for requests of this model, in words."""
        if classes := self.residency.classes_of(keys):
            return f"class {classes[0]}"
        if not model:
            return "a class"  # of a workflow that is gone
        nets = self.residency.models[model].controlnets_of(keys)
        return f"the ControlNet {' with '.join(nets)} of the model {model}" if nets else f"the model {model}"

"""ModelLoads: sends the policy's orders to load components, and notes the answers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from core.costs.cost_model import CostModel
from core.messages.worker import Load, ModelFailed, ModelLoaded
from core.scheduling.dispatch import Loads
from core.scheduling.model_demand import ModelDemand
from core.scheduling.node_cache import NodeCache
from core.scheduling.ranks.in_flight import Flight
from core.scheduling.ranks.residency import Residency
from core.scheduling.refusals import Refusals
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.live_requests import LiveRequests

LoadAnswer = ModelLoaded | ModelFailed
"""A rank's answer to an order to load a component."""


class LoadPolicy(Protocol):
    """What of a scheduling policy decides what is loaded, see `SchedulingPolicy`."""

    @property
    def copies(self) -> Hashable:
        """What it wishes further copies of; a change of it is a reason to decide again."""

    def loads(self, demand: ModelDemand, now: float) -> Loads:
        """What ranks load and drop now."""


@dataclass(slots=True)
class ModelLoads:
    """The mechanism of one scheduler."""

    residency: Residency
    requests: LiveRequests
    cache: NodeCache
    refusals: Refusals
    cost: CostModel
    policy: LoadPolicy
    _decided: Loads = field(default_factory=Loads)
    _state: Hashable = None  # what the policy saw when it decided that, and its own orders
    _again: float = 0.0  # when it is to be decided again even if these are the same, monotonic seconds

    def order(self, now: float) -> tuple[Load, ...]:
        """What ranks are to load and drop now."""
        return (*self._drop_retired(), *self._order(now))

    def _drop_retired(self) -> list[Load]:
        """Orders to drop the weights of classes that no workflow names."""
        drops = [Load((rank,), (), keys) for rank, keys in self.residency.take_retired()]
        for each in drops:
            self.residency.note_sent(each.ranks, (), each.drop)
        return drops

    def _order(self, now: float) -> tuple[Load, ...]:
        if self.residency.is_complete:
            return ()
        demand = ModelDemand(self.residency, self.requests, self.cache)
        if (demand.state, self.policy.copies) == self._state and now < self._again:
            return ()
        self.refusals.fail_stuck(now)
        self._decided = self.policy.loads(demand, now)
        check(self._decided.loads, self.residency)
        for load in self._decided.loads:
            self.residency.note_sent(load.ranks, load.load, load.drop)
        self._state = demand.state, self.policy.copies
        self._again = math.inf if self._decided.again is None else self._decided.again
        return self._decided.loads

    @property
    def startable(self) -> frozenset[ModelKeys] | None:
        """What waiting requests may need that begin now, as last decided; None: anything that is there."""
        return None if self.residency.is_complete else self._decided.startable

    def note_batch(self, flight: Flight, now: float) -> None:
        """Note a batch that is sent."""
        self.residency.note_use(flight.keys, now)

    def apply(self, answer: LoadAnswer, now: float) -> None:
        """Process a rank's answer to an order. Requests that need a component that cannot be loaded fail."""
        if isinstance(answer, ModelLoaded):
            self.residency.note_loaded(answer.rank, answer.loaded)
            self.cost.observe_load(answer.loaded.nbytes, answer.seconds)
            return
        self.refusals.note_failed_load(answer.rank, answer.key, answer.failure, now)


def check(loads: Iterable[Load], residency: Residency) -> None:
    """Raise AssertionError unless all of these can be carried out now, on live ranks and within the budget of bytes."""
    up, seen = {rank for ranks in residency.sets for rank in ranks}, set[int]()
    for each in loads:
        assert up.issuperset(each.ranks), f"a rank of {each.ranks} is dead"
        assert seen.isdisjoint(each.ranks), f"a rank of {each.ranks} gets two orders"
        seen.update(each.ranks)
        for rank in each.ranks:
            present = residency.present((rank,))
            assert residency.awaited((rank,)).isdisjoint(each.drop), f"rank {rank} is loading what it is to drop"
            assert residency.excess(each.load, present - {*each.drop}) <= 0, f"rank {rank} has no room for {each.load}"

"""Copies: which denoisers are wanted on further ranks, because their requests would wait longer than a load takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import erfc, exp, inf, sqrt

from core.scheduling.dispatch import Copy
from core.scheduling.policies.planner.predictions import Predictions
from core.scheduling.ranks.residency import keys_of
from core.scheduling.requests.bindings import ModelKeys
from core.scheduling.requests.request import Request
from core.scheduling.view import View

MEMORY_SECONDS = 60.0
"""Work that came so long ago counts about a third of new work where the work to come is predicted."""

NEWEST = 0.05
"""Share of the newest request in the mean work of a request."""


@dataclass(slots=True)
class _Demand:
    """What is known of the requests of one denoiser. Seconds of work are those that one rank takes."""

    rate: float  # seconds of work that come per second
    mean: float  # seconds of work of a request
    # As of the last call of `Copies.wanted`.
    work: float = 0.0  # seconds of work that wait
    needs: dict[ModelKeys, None] = field(default_factory=dict)  # of these requests
    ranks: set[int] = field(default_factory=set)  # that have the denoiser, or are loading it

    def missed(self, num_ranks: int, load: float, spread: float = 0.0) -> float:
        """Requests that so many ranks leave waiting, of what waits and comes, for longer than a load and their own work
        take. load: seconds. spread: standard deviations by which more comes than on average, if it comes at random.
        """
        within = load + self.mean
        come = within * self.rate
        work = self.work + come + spread * sqrt(come * self.mean) - within * num_ranks
        return work / self.mean if self.mean else 0.0

    def worth(self, num_ranks: int, load: float) -> float:
        """Requests per second that the last of so many ranks serves: how likely so many are busy at once, if work comes
        at random, divided by what a request takes. load: seconds of loading, after which another rank could help.
        """
        busy = self.rate + self.work / (load + self.mean)
        return erfc((num_ranks - 0.5 - busy) / sqrt(2 * busy)) / 2 / self.mean if busy and self.mean else 0.0


class Copies:
    """The demand for each denoiser. What is not known yet is assumed to need all ranks that have it."""

    def __init__(self) -> None:
        self._new: list[Request] = []  # since the last call of `wanted`
        self._demands: dict[ModelKeys, _Demand] = {}
        self._made_at = -inf  # when, monotonic seconds
        self._began_at = inf  # when the first request was seen: until later, what is quiet may only not have begun

    def note_arrival(self, request: Request) -> None:
        """Note a new request."""
        self._new.append(request)

    def wanted(
        self,
        view: View,
        now: float,
        requests: Sequence[Request],
        idle: Collection[int],
        predictions: Predictions,
    ) -> tuple[Copy, ...]:
        """The copies that are worth their loads, at most one of each denoiser: what its requests need, on a rank whose
        own denoisers can do without it. requests: that may run. idle: ranks that have nothing to do.
        """
        self._note_rates(view, now, predictions)
        if view.is_complete or now - self._began_at < MEMORY_SECONDS:
            return ()
        self._note_work(view, requests, predictions)
        free, found = {rank for rank in idle if not view.is_loading(rank)}, list[Copy]()
        hot = [each for each in self._demands.values() if each.work and each.missed(len(each.ranks), 0.0) > 0]
        for demand in sorted(hot, key=lambda each: each.worth(len(each.ranks) + 1, 0.0), reverse=True):
            needs = tuple(demand.needs)
            ranks = ((self._cost(view, demand, needs, rank), rank) for rank in free - demand.ranks)
            cost, rank = min(ranks, default=(inf, -1))
            if cost < inf:
                free.remove(rank)
                found.append((needs, rank))
        return tuple(found)

    def _cost(self, view: View, demand: _Demand, needs: Iterable[ModelKeys], rank: int) -> float:
        """What a rank's own denoisers lose without it, in requests per second; inf: that, or the load, is too much."""
        load = view.load_seconds_on(rank, keys_of(needs))
        if load == inf or (missed := demand.missed(len(demand.ranks), load)) <= 0:
            return inf
        own = [each for each in self._demands.values() if rank in each.ranks]
        cost = max((each.worth(len(each.ranks), load) for each in own), default=0.0)
        others = max((each.missed(len(each.ranks) - 1, load, 1.0) for each in own), default=0.0)
        return cost if cost < demand.worth(len(demand.ranks) + 1, load) and others < missed else inf

    def _note_rates(self, view: View, now: float, predictions: Predictions) -> None:
        self._began_at = min(self._began_at, now) if self._new else self._began_at
        fading, self._made_at = exp((self._made_at - now) / MEMORY_SECONDS), now
        for demand in self._demands.values():
            demand.rate *= fading
        for request in self._new:
            if request.is_live and (keys := request.denoiser) is not None:
                seconds = predictions.of(view, request).work(request)
                if keys not in self._demands:
                    self._demands[keys] = _Demand(len(view.ranks_to_have(keys)), seconds)
                demand = self._demands[keys]
                demand.rate += seconds / MEMORY_SECONDS
                demand.mean += NEWEST * (seconds - demand.mean)
        self._new.clear()

    def _note_work(self, view: View, requests: Iterable[Request], predictions: Predictions) -> None:
        for keys, demand in self._demands.items():
            demand.work, demand.needs, demand.ranks = 0.0, {}, {*view.ranks_to_have(keys)}
        for request in requests:
            denoiser = request.denoiser
            found = None if denoiser is None else self._demands.get(denoiser)
            if found is not None:
                found.work += predictions.of(view, request).work(request)
                found.needs |= dict.fromkeys(request.needs)

"""ModelDemand: what requests and the cache's jobs compute with, as a policy sees it when it decides about loads."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from core.scheduling.node_cache import NodeCache
from core.scheduling.ranks.residency import Residency
from core.scheduling.requests.bindings import Needs
from core.scheduling.requests.live_requests import LiveRequests
from core.scheduling.requests.request import Status


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Of one scheduler. A policy must not change the objects that it gets from here."""

    residency: Residency
    requests: LiveRequests
    cache: NodeCache

    @property
    def state(self) -> Hashable:
        """What a policy can see here, but for the time: while it is equal to an earlier one, nothing has changed."""
        running = [*map(self.cache.rank_of, self.requests.running)] if self.cache.has_devices else []
        jobs = ((job.model, job.rank, job.is_idle_work) for job in self.cache.jobs())
        models = frozenset(self.cache.models_in_use), tuple(self.cache.wanted_models().items())
        behind = tuple(request.id for request in self.requests.running if self.cache.waits_for_others(request))
        return self.residency.version, self.requests.version, models, tuple(jobs), tuple(running), behind

    @property
    def has_missing(self) -> bool:
        """Whether something that is wanted is nowhere, or not where it is wanted."""
        models = map(self.residency.priming_needs_of, self.cache.wanted_models())
        if not self.residency.are_there(self.requests.needs) or any(map(self.residency.missing, models)):
            return True
        bound = [(needs, rank) for needs, rank in self.in_use() if rank is not None] if self.cache.has_devices else ()
        return not all(self.residency.has(keys, (rank,)) for needs, rank in bound for keys in needs)

    def in_use(self) -> Iterator[tuple[Needs, int | None]]:
        """(what it is computed with, the only rank that can read its pages, None: any can) of running requests that do
        not wait for others in the cache, and of the cache's jobs in flight or bound to a rank; while a running request
        waits for others, of all jobs, because it may wait for any of them. Each pair once.
        """
        found: dict[tuple[Needs, int | None], None] = {}
        is_awaited = False
        for request in self.requests.running:
            if self.cache.waits_for_others(request):
                is_awaited = True
            else:
                found[request.needs, self.cache.rank_of(request)] = None
        for model in self.cache.models_in_use:
            found[self.residency.priming_needs_of(model), None] = None
        for job in self.cache.jobs():
            if (is_awaited or job.rank is not None) and not job.is_idle_work:
                found[self.residency.priming_needs_of(job.model), job.rank] = None
        return iter(found)

    def behind_others(self) -> Iterator[Needs]:
        """What the running requests are computed with that wait for others in the cache, each once."""
        running = self.requests.running
        return iter(dict.fromkeys(request.needs for request in running if self.cache.waits_for_others(request)))

    def waiting(self) -> Iterator[tuple[Needs, int | None, float]]:
        """(what it is computed with, the only rank that can read its pages, None: any can, when it came, monotonic
        seconds) of waiting requests, the most urgent first.
        """
        for request in self.requests.live():
            if request.status is Status.WAITING:
                yield request.needs, self.cache.rank_of(request), request.head.arrival

    def templates(self) -> Iterator[tuple[Needs, float]]:
        """(what it is computed with, when the first came) of the models with templates to be primed, but for idle
        work.
        """
        return (
            (self.residency.priming_needs_of(model), arrival) for model, arrival in self.cache.wanted_models().items()
        )

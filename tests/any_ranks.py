"""AnyRanks: a scheduling policy for tests that uses every freedom that a policy has."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from core.graph.workflow import Node
from core.scheduling.dispatch import CacheDispatch, Decision, Dispatch, Fetch
from core.scheduling.node_cache import CacheJob
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.request import Request
from core.scheduling.view import View


class AnyRanks(SchedulingPolicy):
    """Runs every ready node as soon as it can, together with others, on ranks drawn at random, and so the cache's
    work.
    """

    def __init__(self, random: Random, num_ranks: int) -> None:
        self._random = random
        self.num_ranks = num_ranks

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        fetches: list[Decision] = []
        batches: dict[tuple[str, tuple[int, ...]], list[tuple[Request, Node]]] = {}
        for request in list(view.requests.live()):
            for node in view.ready(request):
                ranks = self._ranks(view)
                if view.can_run(request, node, ranks):
                    batches.setdefault((node.op, ranks), []).append((request, node))
                elif view.can_fetch(request, node, ranks):
                    fetches.append(Fetch(request, node, ranks))
        nodes = [Dispatch(tuple(items), ranks) for (_, ranks), items in batches.items()]
        return [*fetches, *nodes, *(self._piece(job, view) for job in view.jobs() if self._may_run(job, view))]

    def page_rank(self, template: str) -> int:
        return self._random.randrange(self.num_ranks)

    def _may_run(self, job: CacheJob, view: View) -> bool:
        if job.is_idle_work and view.requests.running:
            return False
        return not view.open_ranks.isdisjoint(range(view.num_ranks) if job.rank is None else [job.rank])

    def _piece(self, job: CacheJob, view: View) -> CacheDispatch:
        rank = self._random.choice(sorted(view.open_ranks)) if job.rank is None else job.rank
        return CacheDispatch(job, self._random.choice([0, 100, 1000]), rank)

    def _ranks(self, view: View) -> tuple[int, ...]:
        count = self._random.choice([1, 1, 1, 2, view.num_ranks])
        return tuple(sorted(self._random.sample(range(view.num_ranks), min(count, view.num_ranks))))

"""Scheduling policies for tests that use every freedom that a policy has over the cache."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from any_ranks import AnyRanks

from core.scheduling.dispatch import CacheDispatch, Decision
from core.scheduling.node_cache import CacheJob
from core.scheduling.view import View


class AnyCacheRanks(AnyRanks):
    """As AnyRanks; the cache's work and pages go to ranks drawn at random, too."""

    def choose(self, view: View, now: float) -> Sequence[Decision]:
        jobs = [job for job in view.jobs() if self._may_run(job, view)]
        return [*super().choose(view, now), *(self._piece(job, view) for job in jobs)]

    def page_rank(self, template: str, ranks: Sequence[int]) -> int:
        return self._random.choice(ranks)

    def _may_run(self, job: CacheJob, view: View) -> bool:
        if job.is_idle_work and view.requests.running:
            return False
        return not view.open_ranks.isdisjoint(view.ranks if job.rank is None else [job.rank])

    def _piece(self, job: CacheJob, view: View) -> CacheDispatch:
        rank = self._random.choice(sorted(view.open_ranks)) if job.rank is None else job.rank
        return CacheDispatch(job, self._random.choice([0, 100, 1000]), rank)


class ChosenRanks(AnyCacheRanks):
    """Nodes run on one rank, the cache's work on a second where it may, and pages go to a third one's device."""

    def __init__(self, nodes: int, jobs: int, pages: int) -> None:
        super().__init__(Random(0))
        self._nodes, self._jobs, self._pages = nodes, jobs, pages

    def page_rank(self, template: str, ranks: Sequence[int]) -> int:
        return self._pages

    def _may_run(self, job: CacheJob, view: View) -> bool:
        return (self._jobs if job.rank is None else job.rank) in view.open_ranks

    def _piece(self, job: CacheJob, view: View) -> CacheDispatch:
        return CacheDispatch(job, 100, self._jobs if job.rank is None else job.rank)

    def _ranks(self, view: View) -> tuple[int, ...]:
        return (self._nodes,)

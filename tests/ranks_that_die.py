"""A scheduler with fake workers on ranks that die and join again when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import pytest
from any_ranks import answer_of
from fakes import MODEL, FakeWorkers, apply
from run_workflows import CLASSES

from core.config import SchedulerConfig
from core.failure import Failure
from core.graph.workflow import Workflow
from core.messages.engine import AdaptersUsed, EngineRequest, Finished, Output, PartialImage
from core.scheduling.policies.planner.default import Default
from core.scheduling.policies.policy import SchedulingPolicy
from core.scheduling.recovery import checkpoints
from core.scheduling.scheduler import StepScheduler

DIED = Failure("engine_dead", "worker 0 died (killed by signal 9)")
NEVER = 100
"""More retries than any request needs, for tests of something else."""

COMPONENT_BYTES = 1000
"""Of each component that is loaded."""


@contextmanager
def checkpoints_every(rounds: int | None) -> Iterator[None]:
    """While there is a checkpoint after so many rounds, whatever it costs; None: as often as it is worth it."""
    with pytest.MonkeyPatch.context() as patch:
        if rounds is not None:
            patch.setattr(checkpoints, "MAX_ROUNDS", rounds)
            patch.setattr(checkpoints, "MAX_SHARE", 1e9)
        yield


class LiveSite:
    """A scheduler with workers on some ranks, which die and join again when they are told to."""

    def __init__(self, random: Random, scheduler: StepScheduler, workers: FakeWorkers) -> None:
        self._random, self.scheduler, self.workers = random, scheduler, workers
        self.outputs: list[Output] = []
        self.now = 0.0
        self._num_idle = 0

    def step(self) -> None:
        """Schedule, and let one rank answer."""
        self.schedule()
        has_moved = self.finish_loads_and_copies()
        queues = self.workers.queues
        ranks, num_queued = [rank for rank, queue in enumerate(queues) if queue], sum(map(len, queues))
        self._random.shuffle(ranks)
        has_moved |= any(self.answer(rank) for rank in ranks) or sum(map(len, queues)) < num_queued
        may_wait = has_moved or self.workers.dead or not self.scheduler.num_requests
        self._num_idle = 0 if may_wait else self._num_idle + 1
        assert self._num_idle < 50, "all ranks wait"
        self.outputs += self.scheduler.take_outputs()

    def schedule(self) -> None:
        plan = self.scheduler.schedule(self.now)
        while plan is not None:
            self.workers.submit(plan)
            plan = self.scheduler.schedule(self.now, again=True)

    def finish_loads_and_copies(self) -> bool:
        """Whether there were any."""
        loads, pages = self.workers.finish_loads(COMPONENT_BYTES), self.workers.pages
        has_moved = bool(loads or pages.copies)
        for loaded in loads:
            self.scheduler.apply_load(loaded, self.now)
        while pages.copies:
            self.scheduler.apply_copy(pages.finish_copy(0))
        return has_moved

    def answer(self, rank: int) -> bool:
        """Whether a rank has answered its oldest plan."""
        results = self.workers.run_one(rank)
        for result in results:
            apply(self.scheduler, result)
        return bool(results)

    def kill(self, rank: int) -> None:
        self.workers.lose(rank)
        self.scheduler.lose_rank(rank, DIED, self.now)
        self.check()

    def join(self, rank: int) -> None:
        self.workers.join(rank)
        self.scheduler.join_rank(rank, ())
        self.check()

    def check(self) -> None:
        self.outputs += self.scheduler.take_outputs()
        self.scheduler.check_integrity()

    def disturb(self, num_deaths: int) -> None:
        """Let ranks die and join at random, this many times, while requests run."""
        while num_deaths and self.scheduler.num_requests:
            for _ in range(self._random.randint(0, 12)):
                self.step()
            if self._random.random() < 0.5:
                self.schedule()
            up, dead = self.scheduler.ranks.up, sorted(self.workers.dead)
            if up and self._random.random() < 0.6:
                self.kill(self._random.choice(up))
                num_deaths -= 1
            elif dead:
                self.join(self._random.choice(dead))

    def finish(self) -> None:
        """Let all ranks join, run to the end, and check that nothing is left."""
        for rank in sorted(self.workers.dead):
            self.join(rank)
        while self.scheduler.num_requests:
            self.step()
        self.check()
        self.schedule()
        for rank in range(self.workers.num_ranks):
            while self.workers.queues[rank]:
                self.workers.run_one(rank)
        assert not any(self.workers.stored), "values are left"
        assert self.scheduler.values.num_moving == 0

    @property
    def ended(self) -> list[str]:
        return [output.request_id for output in self.outputs if not isinstance(output, PartialImage | AdaptersUsed)]

    def made(self, request: EngineRequest) -> int:
        """A digest of all that a request's output was made from."""
        return self.workers.made[request.request_id, self.scheduler.workflows[request.workflow].last_output.name]


class Site(LiveSite):
    """A site of one model, with no cache."""

    def __init__(
        self, random: Random, num_ranks: int, policy: SchedulingPolicy, served: Sequence[Workflow] = (), **limits: int
    ) -> None:
        settings = {"max_num_seqs": 8, "max_ahead_ms": 1e6, "max_plans_in_flight": 3, "max_retries": NEVER} | limits
        config = SchedulerConfig(**settings)
        scheduler = StepScheduler(config, {"m": MODEL}, num_ranks, policy=policy, classes=CLASSES)
        scheduler.workflows |= {workflow.name: workflow for workflow in served}
        super().__init__(random, scheduler, FakeWorkers(num_ranks, omitted={"sampler"}, answers=answer_of))


def alone(request: EngineRequest, served: Sequence[Workflow] = ()) -> int:
    """What a request makes undisturbed on one rank."""
    site = Site(Random(0), 1, Default(), served)
    site.scheduler.add(request)
    site.finish()
    return site.made(request)


def check_finished(site: Site, request: EngineRequest, served: Sequence[Workflow] = ()) -> None:
    """It has made what it makes alone, and has told each of its previews once, in order."""
    mine = [output for output in site.outputs if output.request_id == request.request_id]
    assert isinstance(mine[-1], Finished), mine[-1]
    assert site.made(request) == alone(request, served)
    shown = [output.index for output in mine if isinstance(output, PartialImage)]
    workflow = site.scheduler.workflows[request.workflow]
    sides = sum(map(workflow.is_preview, workflow.side_nodes))
    assert shown == list(range(min(len(request.spec.previews), request.rounds[-1] - 1))) * sides


def make_site(num_ranks: int, **limits: int) -> Site:
    return Site(Random(0), num_ranks, Default(), **limits)


def run_until(site: Site, is_done: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_done():
            return
        site.step()
    raise AssertionError("it never came")

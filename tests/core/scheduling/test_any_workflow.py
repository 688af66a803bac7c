"""Any workflow on any ranks: every request ends once, with what it makes when it runs alone, and no rank waits forever.

Graphs, ranks and the order of answers are random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from any_ranks import AnyRanks, answer_of, in_workflow, toy_op
from fakes import MODEL, FakeWorkers
from hypothesis import given, settings
from hypothesis import strategies as st
from workflows import ACCEPTANCE, workflows

from core.config import SchedulerConfig
from core.graph.check import check_workflow
from core.graph.workflow import Workflow
from core.graph.workflows.inpaint import INPAINT
from core.messages.engine import EngineRequest, Finished, Output
from core.messages.worker import BatchResult, StepPlan
from core.scheduling.scheduler import StepScheduler


@pytest.fixture(autouse=True, scope="module")
def toy() -> Iterator[None]:
    with toy_op():
        yield


class Site:
    """A scheduler with workers on some ranks."""

    def __init__(self, seed: int, num_ranks: int, served: Sequence[Workflow]) -> None:
        self._random = Random(seed)
        config = SchedulerConfig(max_num_seqs=8, max_ahead_ms=1e6, max_plans_in_flight=3)
        self.scheduler = StepScheduler(config, {"m": MODEL}, num_ranks, policy=AnyRanks(self._random))
        self.scheduler.workflows |= {workflow.name: workflow for workflow in served}
        self.workers = FakeWorkers(num_ranks, omitted={"sampler"}, answers=answer_of)
        self.outputs: list[Output] = []
        self.plans: list[StepPlan] = []
        self._num_run = 0

    def step(self) -> None:
        """Schedule, and let one rank answer."""
        plan = self.scheduler.schedule(0.0)
        while plan is not None:
            self.plans.append(plan)
            self.workers.submit(plan)
            plan = self.scheduler.schedule(0.0, again=True)
        ranks = [rank for rank in range(self.workers.num_ranks) if self.workers.queues[rank]]
        self._random.shuffle(ranks)
        for rank in ranks:
            results = self.workers.run_one(rank)
            for result in results:
                apply = self.scheduler.apply if isinstance(result, BatchResult) else self.scheduler.apply_transfer
                apply(result)  # type: ignore[arg-type]
            if results:
                self._num_run = 0
                break
        else:
            self._num_run += 1
            assert self._num_run < 50, "all ranks wait"
        self.outputs += self.scheduler.take_outputs()

    def run(self) -> None:
        while self.scheduler.num_requests:
            self.step()
        self.outputs += self.scheduler.take_outputs()
        self.scheduler.check_integrity()
        plan = self.scheduler.schedule(0.0)
        while plan is not None:
            self.workers.submit(plan)
            plan = self.scheduler.schedule(0.0, again=True)
        for rank in range(self.workers.num_ranks):
            while self.workers.queues[rank]:
                self.workers.run_one(rank)
        self.workers.check_is_empty()


def what_it_made(site: Site, request: EngineRequest) -> int:
    """A digest of all that its output was made from."""
    return site.workers.made[request.request_id, site.scheduler.workflows[request.workflow].last_output.name]


def alone(request: EngineRequest, served: Sequence[Workflow]) -> int:
    """What the request makes on one rank, by itself."""
    site = Site(0, 1, served)
    site.scheduler.add(request)
    site.run()
    assert [type(output) for output in site.outputs[-1:]] == [Finished]
    return what_it_made(site, request)


@settings(deadline=None)
@given(st.lists(workflows(), min_size=1, max_size=3), st.data(), st.integers(0, 1 << 30), st.integers(1, 4))
def test_random_workflows_make_what_they_make_alone(
    drawn: list[Workflow], data: st.DataObject, seed: int, num_ranks: int
) -> None:
    served = _named(drawn)
    for workflow in served:
        check_workflow(workflow)
    site = Site(seed, num_ranks, served)
    requests = [
        in_workflow(str(index), workflow, [data.draw(st.integers(1, 4)) for _ in workflow.regions], index % 3)
        for index, workflow in enumerate(data.draw(st.lists(st.sampled_from([*served, INPAINT]), max_size=6)))
    ]
    aborted = {request.request_id for request in requests if data.draw(st.integers(0, 5)) == 0}
    failing = {request.request_id for request in requests if data.draw(st.integers(0, 5)) == 0}
    for request in requests:
        site.scheduler.add(request)
        for _ in range(data.draw(st.integers(0, 3))):
            site.step()
    site.scheduler.abort(aborted)
    site.workers.fail |= failing
    site.run()
    ended = [output.request_id for output in site.outputs if not hasattr(output, "index")]
    assert sorted(ended) == sorted(request.request_id for request in requests)
    finished = {output.request_id for output in site.outputs if isinstance(output, Finished)}
    for request in requests:
        if request.request_id in finished:
            assert what_it_made(site, request) == alone(request, served)
    assert finished >= {request.request_id for request in requests} - aborted - failing


def _named(drawn: Sequence[Workflow]) -> list[Workflow]:
    return [Workflow(f"random{i}", w.nodes, w.outputs, w.regions) for i, w in enumerate(drawn)]


def test_two_hundred_requests_of_two_workflows_on_three_ranks() -> None:
    """Two regions whose counts differ by request, a join, a deferred edge, batches on two ranks, ordinary edits."""
    random, served = Random(5), [ACCEPTANCE]
    site, requests = Site(6, 3, served), list[EngineRequest]()
    for index in range(200):
        kind = INPAINT if index % 4 == 0 else ACCEPTANCE
        request = in_workflow(str(index), kind, [random.randint(1, 5) for _ in kind.regions], random.choice([0, 0, 2]))
        requests.append(request)
        site.scheduler.add(request)
        if random.random() < 0.1:
            site.scheduler.abort([str(random.randrange(index + 1))])
        for _ in range(random.randint(0, 6)):
            site.step()
    site.run()
    terminal = [output.request_id for output in site.outputs if not hasattr(output, "index")]
    assert sorted(terminal, key=int) == [request.request_id for request in requests]
    finished = {output.request_id for output in site.outputs if isinstance(output, Finished)}
    assert len(finished) > 150
    batches = [batch for plan in site.plans for batch in plan.batches]
    assert any(len(batch.ranks) == 2 for batch in batches)
    assert any(plan.deliveries for plan in site.plans)
    assert any({len(item.request_id) for item in batch.items} and len(batch.items) > 1 for batch in batches)
    for request in requests:
        if request.request_id in finished:
            assert what_it_made(site, request) == alone(request, served)

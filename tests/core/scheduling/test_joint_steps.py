"""Steps that several ranks compute together: which ranks, and what happens when their group breaks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, product

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, make_edit

from core.config import SchedulerConfig
from core.failure import Failure
from core.graph.work import Work
from core.messages.engine import Failed, Finished, Output
from core.messages.worker import Batch, BatchResult, CostSample
from core.scheduling.recovery.recovery import STEPS_ALONE
from core.scheduling.scheduler import StepScheduler

BROKEN = Failure("group_broken", "a rank has left the group")


FIXED, CHOSEN = SchedulerConfig(degree=2), SchedulerConfig(max_degree=2)
"""Two ranks compute each step, or those where that pays."""

SECONDS = 0.1
"""Of a step of one request on one rank."""


class Site:
    """A scheduler of an engine with three ranks, of which two compute a step."""

    def __init__(self, breaks: Callable[[Batch], bool] = lambda batch: False, config: SchedulerConfig = FIXED) -> None:
        """breaks: whether a batch fails on its second rank."""
        self.scheduler = StepScheduler(config, {"m": MODEL}, 3)
        for degree, number in product((1, 2), (1, 2, 4)):  # sharing a step among requests saves nothing
            work, seconds = Work.of([280] * number), SECONDS * number / degree
            sample = CostSample("m", "denoise", work, seconds, is_profile=True, degree=degree)
            self.scheduler.learn([sample])
        self.scheduler.ranks.note_ports({0: 5000, 1: 5001, 2: 5002})
        self.workers, self.breaks = FakeWorkers(3), breaks
        self.outputs: list[Output] = []
        self.batches: list[Batch] = []

    def run(self) -> None:
        while self.scheduler.num_requests:
            plan = self.scheduler.schedule(0.0)
            if plan is not None:
                self.workers.submit(plan)
                self.batches += plan.batches
            for rank in (2, 1, 0):
                for result in self.workers.run_one(rank):
                    self.apply(result) if isinstance(result, BatchResult) else self.scheduler.apply_transfer(result)
            self.outputs += self.scheduler.take_outputs()
            assert len(self.batches) < 1000, "a request never ends"
        self.scheduler.check_integrity()

    def apply(self, result: BatchResult) -> None:
        batch = next(batch for batch in self.batches if batch.id == result.batch_id)
        if len(batch.ranks) > 1 and result.rank == batch.ranks[1] and self.breaks(batch):
            items = tuple(msgspec.structs.replace(item, tensors=(), failure=BROKEN) for item in result.items)
            result = msgspec.structs.replace(result, items=items)
            self.workers.num_deaths = 1  # steps are repeated, as after a death
        self.scheduler.apply(msgspec.structs.replace(result, seconds=SECONDS * len(batch.items) / len(batch.ranks)))
        self.scheduler.check_integrity()

    def steps(self, request_id: str) -> list[Batch]:
        return [
            batch
            for batch in self.batches
            if any((item.request_id, item.node) == (request_id, "denoise") for item in batch.items)
        ]


def test_steps_run_on_the_first_ranks_and_all_else_on_one() -> None:
    site = Site()
    site.scheduler.add(make_edit("a", steps=3))
    site.run()
    (output,) = site.outputs
    assert isinstance(output, Finished)
    assert output.degrees == (2, 2, 2)
    assert {batch.op: batch.ranks for batch in site.batches} == {
        "text_encode": (0,),
        "image_encode": (0,),
        "denoise": (0, 1),
        "decode": (2,),
    }
    assert {(batch.epoch, batch.port) for batch in site.steps("a")} == {(0, 5000)}
    assert {(batch.epoch, batch.port) for batch in site.batches if len(batch.ranks) == 1} == {(0, 0)}


def test_the_requests_of_a_group_that_breaks_go_on_with_one_rank_each_and_others_meet_anew() -> None:
    seen = []

    def breaks(batch: Batch) -> bool:
        seen.append(batch.id)
        return len(seen) == 2

    site = Site(breaks)
    site.scheduler.add(make_edit("a", steps=4))
    site.run()
    site.scheduler.add(make_edit("b", steps=2))
    site.run()
    first, second = site.outputs
    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert first.degrees == (2, 1, 1, 1)
    assert second.degrees == (2, 2)
    assert [(batch.epoch, batch.ranks) for batch in site.steps("b")] == [(1, (0, 1))] * 2
    assert site.scheduler.stats().steps_repeated == 0, "what breaks a group is no death"


@pytest.mark.parametrize("config", [FIXED, CHOSEN])
def test_a_request_has_several_ranks_again_after_some_steps_on_one(config: SchedulerConfig) -> None:
    """Twice as many the second time."""
    steps = count(1)
    site = Site(lambda batch: next(steps) in (2, 4), config)
    site.scheduler.add(make_edit("a", steps=4 + 3 * STEPS_ALONE))
    site.run()
    (output,) = site.outputs
    assert isinstance(output, Finished)
    assert output.degrees == (2, *[1] * STEPS_ALONE, 2, *[1] * 2 * STEPS_ALONE, 2, 2)


@pytest.mark.parametrize("config", [FIXED, CHOSEN])
def test_a_group_that_always_breaks_fails_no_request(config: SchedulerConfig) -> None:
    site = Site(lambda batch: True, config)
    for number in range(4):
        site.scheduler.add(make_edit(str(number), steps=3 if number else 30))
    site.run()
    assert len(site.outputs) == 4
    assert not [output for output in site.outputs if isinstance(output, Failed)]
    assert site.scheduler.ranks.epoch >= 1


def test_ranks_that_die_are_left_out_and_the_group_meets_elsewhere() -> None:
    site = Site()
    site.scheduler.lose_rank(0, Failure("rank_dead", "killed"))
    site.workers.lose(0)
    site.scheduler.add(make_edit("a", steps=2))
    site.run()
    assert [(batch.ranks, batch.epoch, batch.port) for batch in site.steps("a")] == [((1, 2), 1, 5001)] * 2
    site.workers.join(0)
    site.scheduler.join_rank(0, (), port=6000)
    site.scheduler.add(make_edit("b", steps=1))
    site.run()
    assert [(batch.ranks, batch.port) for batch in site.steps("b")] == [((0, 1), 6000)]

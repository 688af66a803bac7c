"""Halving failed batches: only the failing item fails and is found in few attempts, and the step limit is learnt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil, log2

import msgspec
import pytest
from fakes import MODEL, FakeWorkers, make_edit
from hypothesis import given
from hypothesis import strategies as st

from core.config import SchedulerConfig
from core.failure import Failure
from core.messages.worker import BatchResult, Item, ItemResult
from core.scheduling.ops.text_encode import TextEncode
from core.scheduling.ranks.step_limit import RAISE_BY, StepLimit
from core.scheduling.scheduler import StepScheduler
from model_executor.worker.halving import Attempt, attempt_in_halves

NO_MEMORY, BROKEN = Failure("out_of_memory", "no room"), Failure("engine", "broken")


def make_items(number: int) -> list[Item]:
    return [Item(f"r{i}", "denoise", "m", TextEncode("", 1), ()) for i in range(number)]


class Device:
    """Computes items together unless `fails` returns a failure."""

    def __init__(self, fails: Callable[[Sequence[Item]], Failure | None]) -> None:
        self._fails = fails
        self.attempts: list[list[str]] = []
        self.num_freed = 0

    def attempt(self, items: Sequence[Item]) -> list[ItemResult] | Failure:
        self.attempts.append([item.request_id for item in items])
        return self._fails(items) or [ItemResult(item.request_id, item.node) for item in items]

    def free(self) -> None:
        self.num_freed += 1

    def run(self, number: int) -> tuple[dict[str, Failure | None], int]:
        attempt: Attempt = self.attempt
        results, num_parts = attempt_in_halves(make_items(number), attempt, self.free)
        assert [result.request_id for result in results] == [f"r{i}" for i in range(number)], "in their order"
        return {result.request_id: result.failure for result in results}, num_parts


def test_a_batch_that_works_is_computed_once() -> None:
    device = Device(lambda items: None)
    assert device.run(5) == (dict.fromkeys([f"r{i}" for i in range(5)]), 1)
    assert (len(device.attempts), device.num_freed) == (1, 0)


@given(st.integers(1, 33), st.data())
def test_the_item_at_fault_is_found_and_fails_alone(number: int, data: st.DataObject) -> None:
    culprit = f"r{data.draw(st.integers(0, number - 1))}"
    device = Device(lambda items: BROKEN if any(item.request_id == culprit for item in items) else None)
    failures, _ = device.run(number)
    assert {name for name, failure in failures.items() if failure} == {culprit}
    assert len(device.attempts) <= 2 * ceil(log2(number)) + 1
    done = Counter(name for names in device.attempts if culprit not in names for name in names)
    assert all(times == 1 for times in done.values()), "no item is completed twice"


@given(st.integers(1, 33), st.integers(1, 33))
def test_items_that_do_not_fit_together_are_done_in_parts(number: int, room: int) -> None:
    device = Device(lambda items: NO_MEMORY if len(items) > room else None)
    failures, num_parts = device.run(number)
    assert not any(failures.values())
    assert num_parts >= number / room
    assert device.num_freed == len([names for names in device.attempts if len(names) > room]), "before every retry"


@given(st.integers(1, 33), st.sampled_from([NO_MEMORY, BROKEN]))
def test_if_all_items_fail_the_attempts_end(number: int, failure: Failure) -> None:
    device = Device(lambda items: failure)
    failures, _ = device.run(number)
    assert set(failures.values()) == {failure}
    times = Counter(name for names in device.attempts for name in names)
    assert max(times.values()) <= log2(number) + 3


@pytest.mark.parametrize(("failure", "is_done"), [(NO_MEMORY, True), (BROKEN, False)])
def test_a_lone_item_is_tried_again_only_after_running_out_of_memory(failure: Failure, is_done: bool) -> None:
    device = Device(lambda items: failure if device.num_freed == 0 else None)
    failures, _ = device.run(1)
    assert (failures["r0"] is None) == is_done


def test_the_step_limit_falls_to_a_size_that_fitted_and_recovers() -> None:
    limit = StepLimit(8000)
    limit.note_done(8000)
    assert limit.tokens == 8000
    limit.note_split(8000, 2)
    assert limit.tokens == 4000
    limit.note_split(4000, 3)
    assert limit.tokens == 1333
    for _ in range(RAISE_BY):
        limit.note_done(limit.tokens)
    assert 2 * 1333 < limit.tokens < 4000
    for _ in range(RAISE_BY):
        limit.note_done(limit.tokens)
    assert limit.tokens == 8000


def test_a_step_far_below_the_limit_does_not_change_it() -> None:
    limit = StepLimit(8000)
    limit.note_split(8000, 2)
    limit.note_done(1999)
    assert limit.tokens == 4000
    limit.note_done(2000)
    assert limit.tokens > 4000


def test_the_step_limit_never_rises_by_a_failure_nor_falls_to_zero() -> None:
    limit = StepLimit(1000)
    limit.note_split(10, 8)
    assert limit.tokens == 1
    limit.note_split(5000, 2)
    assert limit.tokens == 1
    limit.note_done(280)
    assert limit.tokens == 2


@pytest.mark.parametrize("is_a_requests_fault", [False, True])
def test_after_a_step_done_in_parts_fewer_requests_share_a_step(is_a_requests_fault: bool) -> None:
    """Unless the cause was a request that failed by itself and is gone now."""
    scheduler, workers = StepScheduler(SchedulerConfig(), {"m": MODEL}), FakeWorkers()
    for i in range(4):
        scheduler.add(make_edit(f"r{i}", steps=8))
    sizes = []
    while scheduler.num_requests:
        plan = scheduler.schedule(now=0.0)
        if plan is not None:
            workers.submit(plan)
            sizes += [len(batch.items) for batch in plan.batches if batch.op == "denoise"]
        workers.fail = {"r0"} if is_a_requests_fault and len(sizes) == 1 else set()
        for result in workers.run_one(0):
            assert isinstance(result, BatchResult)
            is_split = len(sizes) == 1 and len(result.items) > 1
            scheduler.apply(msgspec.structs.replace(result, num_parts=2 if is_split else 1))
        scheduler.check_integrity()
        scheduler.take_outputs()
    assert sizes[:2] == ([4, 3] if is_a_requests_fault else [4, 2])
    stats = scheduler.stats()
    assert stats.steps == len(sizes)
    assert len(stats.recent_steps) == len(sizes) - 1, "a step done in parts has no prediction"

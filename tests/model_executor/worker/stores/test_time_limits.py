"""TimeLimits: one thread watches all blocks, whichever of them ends first."""

from __future__ import annotations

import threading
import time
from queue import Queue

import pytest

from core.messages.worker import WorkerFailed
from core.run_class import RunClass
from model_executor.worker.stores.time_limits import TimeLimits

SLOW = RunClass(name="slow", path="m:Slow", load_seconds=30.0)
FAST = RunClass(name="fast", path="m:Fast", load_seconds=0.1)


@pytest.mark.parametrize("is_beside", [False, True], ids=["alone", "beside a longer one"])
def test_a_block_beyond_its_limit_is_reported_once_while_it_runs(is_beside: bool) -> None:
    said: Queue[WorkerFailed] = Queue()
    limits = TimeLimits(0, said.put)
    with limits.of_load(SLOW if is_beside else FAST), limits.of_load(FAST):
        begun = time.monotonic()
        assert said.get(timeout=10).culprit == FAST.key
        assert time.monotonic() - begun < 5, "the thread waited for the longer one"
        if not is_beside:
            assert said.get(timeout=10).culprit == FAST.key
    time.sleep(0.2)
    assert said.empty()


def test_a_block_that_ends_in_time_is_not_reported_and_leaves_no_thread_of_its_own() -> None:
    said: list[WorkerFailed] = []
    limits = TimeLimits(0, said.append)
    before = threading.active_count()
    for _ in range(50):
        with limits.of_load(FAST):
            pass
    assert threading.active_count() == before + 1
    with limits.of_load(SLOW):
        time.sleep(0.2)
    assert not said

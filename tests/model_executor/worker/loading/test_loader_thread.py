"""The thread that loads: one order, and the worker's device."""

from __future__ import annotations

import threading

import pytest
import torch
from user_classes import Panic

from model_executor.worker.loading.loader_thread import LoaderThread


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, Panic])
def test_jobs_are_done_in_order_also_after_one_that_fails(error: type[BaseException]) -> None:
    thread, done = LoaderThread(torch.device("cpu")), list[int]()

    def fail() -> None:
        raise error

    waits = [thread.put(job) for job in (lambda: done.append(0), fail, lambda: done.append(1))]
    assert all(wait(5) for wait in waits)
    assert done == [0, 1]


def test_it_chooses_the_workers_gpu_before_its_first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device is per thread: what a load runs without naming one would run on the first GPU."""
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    thread, seen = LoaderThread(torch.device("cuda:1")), list[int]()
    for _ in range(2):
        thread.put(lambda: seen.append(len(chosen)))()
    assert chosen == [("loader", torch.device("cuda:1"))]
    assert seen == [1, 1]

"""One engine whose processes die repeatedly: every request ends once, with the picture of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from fault_kit import (
    EDITS,
    assert_alike,
    begin,
    count,
    ends,
    finals,
    make_input,
    processes,
    run,
    run_each,
    start,
    until,
)
from forked_processes import ForkedLauncher

from core import restarts
from core.errors import DeadlineExceededError
from core.ipc.process import ChildProcess
from core.messages.image_processor import ComposeImage, PrepareImages, ToImageProcessor
from core.sampling_params import SamplingParams
from engine.client import services
from engine.client.async_engine import AsyncEngine
from engine.client.processes import worker_launcher
from engine.client.processes.worker_launcher import WorkerLauncher
from engine.router import engine_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    """An engine for which each death counts as the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_replica, "PROVEN_SECONDS", 0.0)
        async with start(tiny_checkpoint) as engine:
            yield engine


def busy_with(engine: AsyncEngine, kind: type[ToImageProcessor]) -> ChildProcess | None:
    """The image processor that works on such a job; None if there is none."""
    processors = (processor for processor in engine.services.images._processors if processor.job is not None)
    return next((p.child for p in processors if p.job is not None and isinstance(p.job.message, kind)), None)


async def stopped_in_its_work(engine: AsyncEngine, kind: type[ToImageProcessor]) -> ChildProcess:
    """An image processor that was stopped while it works on such a job."""
    while True:
        await until(lambda: busy_with(engine, kind) is not None)
        victim = busy_with(engine, kind)
        assert victim is not None
        os.kill(victim.pid, signal.SIGSTOP)
        await asyncio.sleep(0.1)  # time to receive what it sent before
        if busy_with(engine, kind) is victim:
            return victim
        os.kill(victim.pid, signal.SIGCONT)


async def test_an_image_processor_that_dies_during_a_job_changes_no_result(engine: AsyncEngine) -> None:
    """While it decodes an upload, and while it pastes and encodes a result."""
    edits = {f"r{seed}": make_input(seed, side=1500) for seed in range(3)}
    done = count(engine, "request_success")
    expected = await run_each(engine, edits)
    tasks = {name: asyncio.create_task(run(engine, name, edit)) for name, edit in edits.items()}
    for kind in (PrepareImages, ComposeImage):
        (await stopped_in_its_work(engine, kind)).kill()
    assert_alike(await ends(tasks), expected)
    assert (engine.services.images.num_deaths, engine.services.images.num_retries) == (2, 2)
    assert count(engine, "request_success") == done + 2 * len(edits)


async def test_after_a_death_every_request_ends_with_the_picture_of_an_undisturbed_run(engine: AsyncEngine) -> None:
    expected, done = await run_each(engine, EDITS), count(engine, "request_success")
    for kind in ("worker", "engine"):
        tasks = await begin(engine, EDITS)
        await asyncio.sleep(0.1)
        processes(kind)[0].kill()
        await until(lambda: not engine.is_ready)
        told = await ends(tasks)
        assert_alike(told, expected)
        assert finals(told) == finals(expected), "to the last bit, in the dtype that `auto` is"
        await until(lambda: engine.is_ready)
    assert await run(engine, "later", EDITS["r0"]) == expected["r0"], "the new engine paints the same"
    assert (count(engine, "rank_restarts"), count(engine, "engine_restarts")) == (1, 1)
    assert 1 <= count(engine, "request_retries") <= len(EDITS), "of the engine's death"
    assert count(engine, "request_success") == done + 2 * len(EDITS) + 1


@pytest.mark.one_machine
async def test_when_the_launcher_dies_its_worker_is_replaced_without_it(
    launcher: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_launcher, "spawn", partial(ForkedLauncher, launcher))
    monkeypatch.setattr(services, "worker_launcher", WorkerLauncher())
    others = processes("worker")
    async with start(tiny_checkpoint) as engine:
        expected = await run_each(engine, EDITS)
        tasks = await begin(engine, EDITS)
        (worker,) = set(processes("worker")) - set(others)
        own = worker.parent()
        assert own is not None
        assert "stencil-launcher" in own.cmdline()
        own.kill()
        assert_alike(await ends(tasks), expected)
        assert (count(engine, "rank_restarts"), count(engine, "engine_restarts")) == (1, 0)


async def test_waiting_for_an_engine_deadlines_hold_and_aborts_are_answered_at_once(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "wait_before", lambda num_restarts: 20.0)
    edit = make_input(steps=200)
    hasty = replace(edit, sampling=SamplingParams(num_inference_steps=200, timeout=12.0))
    due = asyncio.create_task(run(engine, "due", hasty))
    given_up = asyncio.create_task(run(engine, "given up", edit))
    await until(lambda: engine.num_requests_running == 2)
    processes("engine")[0].kill()
    await until(lambda: engine.num_requests_waiting == 2)
    assert not engine.is_ready
    given_up.cancel()
    await until(lambda: engine.num_requests_waiting == 1)
    with pytest.raises(DeadlineExceededError):
        await due
    await until(lambda: engine.num_requests_waiting == 0)
    assert not engine.is_ready, "they were answered without an engine"
    await until(lambda: engine.is_ready)
    assert engine.num_requests_running == 0


async def test_shutdown_while_an_engine_is_restarted(engine: AsyncEngine) -> None:
    """The last test, because it ends the shared engine."""
    task = asyncio.create_task(run(engine, "r", make_input(steps=200)))
    await until(lambda: engine.num_requests_running == 1)
    processes("engine")[0].kill()
    await until(lambda: not engine.is_ready)
    started = time.monotonic()
    await engine.shutdown(drain_seconds=0.0)
    with pytest.raises(Exception, match="shut down"):
        await task
    assert time.monotonic() - started < 60, "it does not wait for the engine"

"""Processes that die under load, or hang at work: every request ends once, with the picture of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fault_kit import (
    EDITS,
    POISON,
    Told,
    assert_alike,
    begin,
    count,
    ends,
    make_input,
    processes,
    run,
    run_each,
    shim,
    start,
    until,
)

from core.errors import DeadlineExceededError, EngineDeadError
from core.ipc.process import ChildProcess
from core.messages.image_processor import ComposeImage, PrepareEdit, ToImageProcessor
from core.request import SamplingParams
from engine import engine_replica
from engine.async_engine import AsyncEngine

DEADLY = f"""
import signal

def inject(module, folder):
    run = module.Runner.run

    def poisoned(self, batch):
        if any(getattr(item.work, "prompt", "") == {POISON!r} for item in batch.items):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, batch)

    module.Runner.run = poisoned
"""
"""A worker that is to encode this prompt dies, as of a bug in a library."""


@pytest.mark.parametrize("size", [1, 2])
async def test_after_a_death_every_request_ends_with_the_picture_of_an_undisturbed_run(
    tiny_checkpoint: Path, size: int
) -> None:
    async with start(tiny_checkpoint, size) as engine:
        expected = await run_each(engine, EDITS)
        for kind in ("worker", "engine"):
            tasks = await begin(engine, EDITS)
            await asyncio.sleep(0.1)
            processes(kind)[0].kill()
            await until(lambda: sum(engine.alive) == size - 1)
            assert engine.is_ready == (size == 2)
            assert_alike(await ends(tasks), expected)
            await until(lambda: all(engine.alive))
        assert await run(engine, "later", EDITS["r0"]) == expected["r0"], "the new engine paints the same"
        assert count(engine, "engine_restarts") == 2
        assert 2 <= count(engine, "request_retries") <= 2 * len(EDITS)
        assert count(engine, "request_success") == 3 * len(EDITS) + 1


async def test_a_worker_that_dies_or_hangs_between_partial_images_changes_no_byte_and_repeats_none(
    tiny_checkpoint: Path,
) -> None:
    edit = make_input(steps=100, partial_images=3)
    async with start(tiny_checkpoint, hang_seconds=5.0) as engine:
        expected = await run(engine, "undisturbed", edit)
        assert [index for index, _ in expected] == [0, 1, 2, None]
        for number, fault in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            told: Told = []
            async with asyncio.timeout(180), engine.edit(f"disturbed-{number}", edit) as outputs:
                async for output in outputs:
                    told.append((output.partial_index, bytes(output.data)))
                    if len(told) == 1:
                        processes("worker")[0].send_signal(fault)
            assert told == expected
            assert count(engine, "request_retries") == number


async def test_a_request_that_kills_workers_ends_and_takes_no_other_along(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim(tmp_path, monkeypatch, DEADLY)
    async with start(tiny_checkpoint) as engine:
        tasks = await begin(engine, EDITS)
        with pytest.raises(EngineDeadError, match=r"3 engines died while running this request.*SIGKILL"):
            await asyncio.wait_for(run(engine, "poison", make_input(prompt=POISON)), 180)
        for outputs in (await ends(tasks)).values():
            assert outputs[-1][0] is None
        await until(lambda: engine.is_ready)
        assert count(engine, "engine_restarts") == 3


async def test_waiting_for_an_engine_deadlines_hold_and_aborts_are_answered_at_once(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_replica, "wait_before", lambda num_restarts: 20.0)
    async with start(tiny_checkpoint) as engine:
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
        assert not engine.is_ready, "nobody was needed to answer them"
        await until(lambda: engine.is_ready)
        assert engine.num_requests_running == 0


async def test_an_engine_that_keeps_dying_is_given_up_and_the_last_one_ends_all(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_replica, "MAX_RESTARTS", 1)
    async with start(tiny_checkpoint, max_retries=5) as engine:
        task = asyncio.create_task(run(engine, "r", make_input(steps=200)))
        failed = asyncio.create_task(engine.failed())
        for _ in range(2):
            await until(lambda: engine.num_requests_running == 1)
            assert not failed.done()
            processes("engine")[0].kill()
            await until(lambda: not engine.is_ready)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(task, 10)
        assert "SIGKILL" in str(await asyncio.wait_for(failed, 10))
        with pytest.raises(EngineDeadError):
            await run(engine, "too late", make_input())


async def test_shutdown_while_an_engine_is_started_anew(tiny_checkpoint: Path) -> None:
    async with start(tiny_checkpoint) as engine:
        task = asyncio.create_task(run(engine, "r", make_input(steps=200)))
        await until(lambda: engine.num_requests_running == 1)
        processes("engine")[0].kill()
        await until(lambda: not engine.is_ready)
        started = time.monotonic()
        await engine.shutdown(drain_seconds=0.0)
        with pytest.raises(Exception, match="shut down"):
            await task
        assert time.monotonic() - started < 60, "it does not wait for the engine"


def busy_with(engine: AsyncEngine, kind: type[ToImageProcessor]) -> ChildProcess | None:
    """An image processor that does such a job."""
    processors = (processor for processor in engine.images._processors if processor.job is not None)
    return next((p.child for p in processors if p.job is not None and isinstance(p.job.message, kind)), None)


async def stopped_in_its_work(engine: AsyncEngine, kind: type[ToImageProcessor]) -> ChildProcess:
    """An image processor with such a job, stopped before it was done."""
    while True:
        await until(lambda: busy_with(engine, kind) is not None)
        victim = busy_with(engine, kind)
        assert victim is not None
        os.kill(victim.pid, signal.SIGSTOP)
        await asyncio.sleep(0.1)  # what it said before has been heard by then
        if busy_with(engine, kind) is victim:
            return victim
        os.kill(victim.pid, signal.SIGCONT)


async def test_an_image_processor_that_dies_in_its_work_changes_nothing(tiny_checkpoint: Path) -> None:
    """Decoding an upload, and pasting and encoding a result."""
    edits = {f"r{seed}": make_input(seed, side=1500) for seed in range(3)}
    async with start(tiny_checkpoint) as engine:
        expected = await run_each(engine, edits)
        tasks = {name: asyncio.create_task(run(engine, name, edit)) for name, edit in edits.items()}
        for kind in (PrepareEdit, ComposeImage):
            (await stopped_in_its_work(engine, kind)).kill()
        assert_alike(await ends(tasks), expected)
        assert (engine.images.num_deaths, engine.images.num_retries) == (2, 2)
        assert count(engine, "request_success") == 2 * len(edits)

"""Engines that die under load, or hang at work: every request ends once, with the picture of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
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

from core.errors import EngineDeadError
from engine.router import engine_replica

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


async def test_with_two_engines_the_other_one_takes_over(tiny_checkpoint: Path) -> None:
    async with start(tiny_checkpoint, 2) as engine:
        expected = await run_each(engine, EDITS)
        tasks = await begin(engine, EDITS)
        await asyncio.sleep(0.1)
        processes("worker")[0].kill()
        await until(lambda: sum(engine.alive) == 1)
        assert engine.is_ready
        assert_alike(await ends(tasks), expected)
        await until(lambda: all(engine.alive))
        assert count(engine, "engine_restarts") == 1
        assert 1 <= count(engine, "request_retries") <= len(EDITS)
        assert count(engine, "request_success") == 2 * len(EDITS)


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


async def test_a_request_that_kills_workers_fails_without_failing_others(
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


async def test_an_engine_that_keeps_dying_is_given_up_and_without_engines_all_edits_fail(
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

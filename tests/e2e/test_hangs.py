"""Engines that hang at work, when idle or while they start: they are killed with their workers, and their edits
continue.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest
from fault_kit import (
    BRIEF,
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
from engine.client.async_engine import AsyncEngine
from engine.router import engine_replica

STUCK = """
import time

def inject(module, folder):
    while os.path.exists(folder + "/stuck"):
        time.sleep(0.02)
"""
"""A worker that does not come to load its model, as of a file system that gives no answer."""


async def until_restarted(engine: AsyncEngine, times: int) -> None:
    """Wait until the engine is restarted, or about to be, for the given number of times in a row."""
    await until(lambda: engine.replicas[0] == ("restarting", times))


async def test_an_engine_that_is_stopped_is_killed_with_its_workers(tiny_checkpoint: Path) -> None:
    """Also a worker that cannot exit by itself."""
    async with start(tiny_checkpoint, 2, hang_seconds=5.0) as engine:
        expected = await run_each(engine, BRIEF)
        tasks = await begin(engine, BRIEF)
        gone = processes("engine")[0], processes("worker")[0]
        for process in reversed(gone):
            process.suspend()
        await until(lambda: engine.alive == (False, True))
        assert_alike(await ends(tasks), expected)
        _, alive = psutil.wait_procs(gone, timeout=10)
        assert not alive
        assert engine.replicas[0] == ("restarting", 1)
        await until(lambda: all(engine.alive))
        assert [state for state, _ in engine.replicas] == ["serving", "serving"]
        assert count(engine, "engine_restarts") == 1
        assert count(engine, "request_success") == 2 * len(BRIEF)


async def test_an_engine_that_is_stopped_while_idle_is_noticed_before_the_next_edit(tiny_checkpoint: Path) -> None:
    async with start(tiny_checkpoint, hang_seconds=5.0) as engine:
        expected = await run(engine, "before", make_input())
        await asyncio.sleep(2 * 5.0)
        assert engine.is_ready, "idle is not hung"
        processes("engine")[0].suspend()
        await until(lambda: not engine.is_ready)
        await until(lambda: engine.is_ready)
        assert await run(engine, "after", make_input()) == expected
        assert (count(engine, "engine_restarts"), count(engine, "request_retries")) == (1, 0)


async def test_an_engine_that_never_becomes_ready_is_reported(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim(tmp_path, monkeypatch, STUCK)
    (tmp_path / "stuck").touch()
    with pytest.raises(EngineDeadError, match=r"did not serve within 3 s \(--start-seconds\)"):
        async with start(tiny_checkpoint, start_seconds=3.0):
            pass


async def test_hanging_during_a_restart_counts_as_one_more_death(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its worker hangs, then the engine itself; the third start succeeds, and the waiting edits continue."""
    monkeypatch.setattr(engine_replica, "MIN_RESTART_SECONDS", 0.0)
    monkeypatch.setattr(engine_replica, "RESTART_PATIENCE", 2.0)  # as long again as the first start, on this machine
    shim(tmp_path, monkeypatch, STUCK)
    async with start(tiny_checkpoint) as engine:
        expected = await run_each(engine, BRIEF)
        tasks = await begin(engine, BRIEF)
        (tmp_path / "stuck").touch()
        processes("worker")[0].kill()
        await until(lambda: count(engine, "engine_restarts") == 1)
        await until(lambda: count(engine, "engine_restarts") == 2, 300)
        (tmp_path / "stuck").unlink()
        await until(lambda: bool(processes("engine")))
        processes("engine")[0].suspend()
        assert not engine.is_ready
        assert_alike(await ends(tasks, 300), expected)
        assert engine.replicas == (("serving", 3),)
        assert count(engine, "request_success") == 2 * len(BRIEF)


async def test_restarts_back_off_while_edits_wait_and_shutdown_does_not(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_replica, "FIRST_WAIT_SECONDS", 2.0)
    async with start(tiny_checkpoint) as engine:
        expected = await run(engine, "before", make_input(steps=100))
        task = asyncio.create_task(run(engine, "waits", make_input(steps=100)))
        for restarts in (1, 2):
            await until(lambda: engine.num_requests_running == 1)
            died = time.monotonic()
            processes("engine")[0].kill()
            await until_restarted(engine, restarts)
            await until(lambda: bool(processes("engine")))
            assert time.monotonic() - died >= (0.0, 2.0)[restarts - 1]
            assert engine.num_requests_waiting == 1
        assert await asyncio.wait_for(task, 180) == expected
        monkeypatch.setattr(engine_replica, "FIRST_WAIT_SECONDS", 1000.0)
        monkeypatch.setattr(engine_replica, "MAX_WAIT_SECONDS", 1000.0)
        processes("engine")[0].kill()
        await until_restarted(engine, 3)
        assert not processes("engine")
        await asyncio.wait_for(engine.shutdown(drain_seconds=0.0), 60)

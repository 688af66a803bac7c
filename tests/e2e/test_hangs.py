"""Engines that hang at work, when idle or while they start: they are killed with their workers, and their edits
continue. All but the last test share one engine, in this order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
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

from core import restarts
from core.errors import EngineDeadError
from engine.client.async_engine import AsyncEngine
from engine.router import engine_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANG_SECONDS = 3.0

STUCK = """
import time

def inject(module, folder):
    while os.path.exists(folder + "/stuck"):
        time.sleep(0.02)
"""
"""A worker that does not come to load its model, as of a file system that gives no answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where workers that start look whether they are stuck."""
    return tmp_path_factory.mktemp("stuck")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_checkpoint: Path, folder: Path) -> AsyncIterator[AsyncEngine]:
    """An engine for which each death after it has served counts as the first. A restart may take three times as long as
    its first start.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_replica, "PROVEN_SECONDS", 0.0)
        patch.setattr(restarts, "MIN_RESTART_SECONDS", 0.0)
        patch.setattr(restarts, "RESTART_PATIENCE", 3.0)
        shim(folder, patch, STUCK)
        async with start(tiny_checkpoint, hang_seconds=HANG_SECONDS) as engine:
            yield engine


async def until_restarted(engine: AsyncEngine, times: int) -> None:
    """Wait until the engine is restarted, or about to be, for the given number of times in a row."""
    await until(lambda: engine.replicas[0] == ("restarting", times))


async def test_hanging_during_a_restart_counts_as_one_more_death(engine: AsyncEngine, folder: Path) -> None:
    """First its worker hangs, then the engine itself; the third start succeeds, and the waiting edits continue."""
    replica = engine.services.engines.replicas[0]
    assert 1.0 < replica._start_seconds < 120.0, "three times as long as it took at first"
    expected = await run_each(engine, BRIEF)
    tasks = await begin(engine, BRIEF)
    (folder / "stuck").touch()
    processes("engine")[0].kill()
    await until(lambda: count(engine, "engine_restarts") == 1)
    await until_restarted(engine, 2)
    replica._start_seconds = 3.0  # of the next start, which is stopped as soon as it has begun
    await until(lambda: count(engine, "engine_restarts") == 2, 300)
    (folder / "stuck").unlink()
    await until(lambda: bool(processes("engine")))
    processes("engine")[0].suspend()
    replica._start_seconds = 300.0
    assert not engine.is_ready
    assert_alike(await ends(tasks, 300), expected)
    assert engine.replicas == (("serving", 3),)
    assert count(engine, "request_success") == 2 * len(BRIEF)


async def test_an_engine_that_is_stopped_while_idle_is_noticed_before_the_next_edit(engine: AsyncEngine) -> None:
    before, retries = count(engine, "engine_restarts"), count(engine, "request_retries")
    expected = await run(engine, "before", make_input())
    await asyncio.sleep(2 * HANG_SECONDS)
    assert engine.is_ready, "idle is not hung"
    processes("engine")[0].suspend()
    await until(lambda: not engine.is_ready)
    await until(lambda: engine.is_ready)
    assert await run(engine, "after", make_input()) == expected
    assert (count(engine, "engine_restarts"), count(engine, "request_retries")) == (before + 1, retries)


async def test_restarts_back_off_while_edits_wait_and_shutdown_does_not(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of the shared engine, because it ends it."""
    monkeypatch.setattr(restarts, "FIRST_WAIT_SECONDS", 2.0)
    expected = await run(engine, "before", make_input(steps=100))
    task = asyncio.create_task(run(engine, "waits", make_input(steps=100)))
    for number in (1, 2):
        before = count(engine, "engine_restarts")
        await until(lambda: engine.num_requests_running == 1)
        died = time.monotonic()
        processes("engine")[0].kill()
        await until(lambda before=before: count(engine, "engine_restarts") == before + 1)
        assert engine.replicas[0] == ("restarting", number)
        assert time.monotonic() - died >= (0.0, 2.0)[number - 1]
        assert engine.num_requests_waiting == 1
        monkeypatch.setattr(engine_replica, "PROVEN_SECONDS", 60.0)  # from now on in a row
    assert await asyncio.wait_for(task, 180) == expected
    monkeypatch.setattr(restarts, "FIRST_WAIT_SECONDS", 1000.0)
    monkeypatch.setattr(restarts, "MAX_WAIT_SECONDS", 1000.0)
    processes("engine")[0].kill()
    await until_restarted(engine, 3)
    assert not processes("engine")
    await asyncio.wait_for(engine.shutdown(drain_seconds=0.0), 60)


async def test_an_engine_that_never_becomes_ready_is_reported(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim(tmp_path, monkeypatch, STUCK)
    (tmp_path / "stuck").touch()
    with pytest.raises(EngineDeadError, match=r"did not serve within 3 s \(--start-seconds\)"):
        async with start(tiny_checkpoint, start_seconds=3.0):
            pass

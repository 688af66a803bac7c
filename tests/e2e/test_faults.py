"""Workers and engines that die under load, or hang at work: every request ends once, with the picture of an undisturbed
run.

The tests share it, in this order.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fault_kit import (
    EDITS,
    POISON,
    Told,
    begin,
    count,
    ends,
    make_input,
    processes,
    run,
    shim,
    start,
    until,
)

from core import restarts
from core.errors import EngineDeadError
from engine.client.async_engine import AsyncEngine
from engine.router import engine_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    """An engine whose worker dies of the poisonous prompt. Each death counts as the first."""
    with pytest.MonkeyPatch.context() as patch:
        shim(tmp_path_factory.mktemp("deadly"), patch, DEADLY)
        patch.setattr(engine_replica, "PROVEN_SECONDS", 0.0)
        async with start(tiny_checkpoint, hang_seconds=3.0) as engine:
            yield engine


async def test_a_worker_that_dies_or_hangs_between_partial_images_changes_no_byte_and_repeats_none(
    engine: AsyncEngine,
) -> None:
    edit = make_input(steps=100, partial_images=3)
    expected = await run(engine, "undisturbed", edit)
    assert [index for index, _ in expected] == [0, 1, 2, None]
    for number, fault in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        told: Told = []
        choice = engine.choose_model()
        async with asyncio.timeout(180), engine.edit(f"disturbed-{number}", edit, choice) as outputs:
            async for output in outputs:
                told.append((output.partial_index, bytes(output.data)))
                if len(told) == 1:
                    processes("worker")[0].send_signal(fault)
        assert told == expected
        assert (count(engine, "rank_restarts"), count(engine, "request_retries")) == (number, 0)


async def test_a_request_that_kills_workers_fails_without_failing_others(engine: AsyncEngine) -> None:
    await until(lambda: engine.is_ready)
    before = count(engine, "rank_restarts")
    tasks = await begin(engine, EDITS)
    with pytest.raises(EngineDeadError, match=r"3 workers died while running this request.*SIGKILL"):
        await asyncio.wait_for(run(engine, "poison", make_input(prompt=POISON)), 180)
    for outputs in (await ends(tasks)).values():
        assert outputs[-1][0] is None
    await until(lambda: engine.is_ready)
    assert (count(engine, "rank_restarts"), count(engine, "engine_restarts")) == (before + 3, 0)


async def test_an_engine_that_keeps_dying_is_given_up_and_without_engines_all_edits_fail(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test, because it ends the shared engine."""
    monkeypatch.setattr(restarts, "MAX_RESTARTS", 1)
    task = asyncio.create_task(run(engine, "r", make_input(steps=200)))
    failed = asyncio.create_task(engine.failed())
    before = count(engine, "engine_restarts")
    await until(lambda: engine.num_requests_running == 1)
    processes("engine")[0].kill()
    await until(lambda: count(engine, "engine_restarts") == before + 1)
    monkeypatch.setattr(engine_replica, "PROVEN_SECONDS", 60.0)  # from now on in a row
    await until(lambda: engine.num_requests_running == 1)
    assert not failed.done()
    processes("engine")[0].kill()  # the second: fewer deaths than a request may cause
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await asyncio.wait_for(task, 10)
    assert "SIGKILL" in str(await asyncio.wait_for(failed, 10))
    with pytest.raises(EngineDeadError):
        await run(engine, "too late", make_input())

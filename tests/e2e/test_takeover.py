"""Two engines, shared by the tests: when one dies or hangs, the other one takes over its edits until it is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from fault_kit import BRIEF, EDITS, assert_alike, begin, count, ends, processes, run, run_each, start, until

from engine.client.async_engine import AsyncEngine
from engine.router import engine_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny_checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    """Engines for which each death counts as the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_replica, "PROVEN_SECONDS", 0.0)
        async with start(tiny_checkpoint, 2, hang_seconds=3.0) as engine:
            yield engine


def counts(engine: AsyncEngine) -> tuple[float, float, float]:
    """How many engines were restarted, requests sent again, and requests finished."""
    names = ("engine_restarts", "request_retries", "request_success")
    restarts, retries, finished = (count(engine, name) for name in names)
    return restarts, retries, finished


async def test_when_an_engine_dies_the_other_one_takes_over(pair: AsyncEngine) -> None:
    before = counts(pair)
    expected = await run_each(pair, EDITS)
    tasks = await begin(pair, EDITS)
    await asyncio.sleep(0.1)
    processes("engine")[0].kill()
    await until(lambda: sum(pair.alive) == 1)
    assert pair.is_ready
    assert_alike(await ends(tasks), expected)
    await until(lambda: all(pair.alive))
    restarts, retries, finished = (now - then for now, then in zip(counts(pair), before, strict=True))
    assert restarts == 1
    assert 1 <= retries <= len(EDITS)
    assert finished == 2 * len(EDITS)


async def test_an_engine_without_a_worker_gets_no_new_edits_and_keeps_those_that_it_has(pair: AsyncEngine) -> None:
    before = counts(pair)
    expected = await run_each(pair, EDITS)
    tasks = await begin(pair, EDITS)
    await asyncio.sleep(0.1)
    processes("worker")[0].kill()
    await until(lambda: pair.alive == (False, True))
    assert pair.replicas[0][0] == "restarting"
    new = {f"new-{name}": edit for name, edit in BRIEF.items()}
    tasks |= {name: asyncio.create_task(run(pair, name, edit)) for name, edit in new.items()}
    await until(lambda: all(pair.services.router.engine_of(f"{name}-0") == 1 for name in new))
    told = await ends(tasks)
    assert_alike({name: told[name] for name in expected}, expected)
    await until(lambda: all(pair.alive))
    restarts, retries, finished = (now - then for now, then in zip(counts(pair), before, strict=True))
    assert (restarts, retries, finished) == (0, 0, 2 * len(EDITS) + len(new))


async def test_an_engine_that_is_stopped_is_killed_with_its_workers(pair: AsyncEngine) -> None:
    """Also a worker that cannot exit by itself."""
    before = counts(pair)
    expected = await run_each(pair, BRIEF)
    tasks = await begin(pair, BRIEF)
    gone = processes("engine")[0], processes("worker")[0]
    for process in reversed(gone):
        process.suspend()
    await until(lambda: pair.alive == (False, True))
    assert pair.replicas[0][0] == "restarting"
    assert_alike(await ends(tasks), expected)
    _, alive = psutil.wait_procs(gone, timeout=10)
    assert not alive
    await until(lambda: all(pair.alive))
    assert [state for state, _ in pair.replicas] == ["serving", "serving"]
    restarts, _, finished = (now - then for now, then in zip(counts(pair), before, strict=True))
    assert (restarts, finished) == (1, 2 * len(BRIEF))

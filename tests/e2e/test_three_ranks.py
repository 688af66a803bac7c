"""An engine with three ranks: pictures as with one, also when ranks are killed at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import psutil
import pytest
import pytest_asyncio
from fault_kit import EDITS, Told, assert_alike, begin, count, ends, make_input, processes, run_each, start, until

from engine.client.async_engine import AsyncEngine
from engine.router import engine_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

HIRES = make_input(9, steps=12, partial_images=1)
HIRES = replace(HIRES, sampling=msgspec.structs.replace(HIRES.sampling, hires_scale=2.0))
MIXED = EDITS | {"hires": HIRES}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tiny_checkpoint: Path) -> dict[str, Told]:
    """What one rank makes."""
    async with start(tiny_checkpoint) as engine:
        return await run_each(engine, MIXED)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    """Three ranks, of an engine for which each death counts as the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_replica, "PROVEN_SECONDS", 0.0)
        async with start(tiny_checkpoint, workers_per_engine=3) as engine:
            yield engine


async def test_edits_alone_have_the_bytes_that_one_rank_makes(engine: AsyncEngine, expected: dict[str, Told]) -> None:
    assert len(processes("worker")) == 3
    assert await run_each(engine, MIXED) == expected


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_kill_9_of_any_rank_loses_nothing(engine: AsyncEngine, expected: dict[str, Told], rank: int) -> None:
    restarts = count(engine, "engine_restarts")
    tasks = await begin(engine, MIXED)
    await asyncio.sleep(Random(rank).uniform(0, 0.3))
    victims = processes("worker")
    victims[rank].kill()
    await until(lambda: not engine.is_ready)
    assert_alike(await ends(tasks), expected)
    await until(lambda: engine.is_ready)
    assert count(engine, "engine_restarts") == restarts + 1
    assert not any(victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE for victim in victims)

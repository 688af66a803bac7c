"""An engine with three ranks: pictures as with one, also when ranks die at any moment, which are replaced alone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import psutil
import pytest
import pytest_asyncio
from fault_kit import EDITS, Told, assert_alike, begin, count, ends, make_input, processes, run_each, shim, start, until

from core.costs.load_report import RankStats
from core.mask_request import MaskRequest
from engine.client.async_engine import AsyncEngine
from tools.random_segmenter_checkpoints import make_clipseg

pytestmark = pytest.mark.asyncio(loop_scope="module")

HIRES = make_input(9, steps=12, partial_images=1)
HIRES = replace(HIRES, sampling=msgspec.structs.replace(HIRES.sampling, hires_scale=2.0))
FOUND = replace(make_input(10, steps=40), mask=None, mask_request=MaskRequest(prompt="the hat"))
MIXED = EDITS | {"hires": HIRES, "found": FOUND}


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path]:
    return (make_clipseg(tmp_path_factory.mktemp("clipseg"), seed=3),)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tiny_checkpoint: Path, segmenter: tuple[Path]) -> dict[str, Told]:
    """What one rank makes."""
    async with start(tiny_checkpoint, segmenter=segmenter) as engine:
        return await run_each(engine, MIXED)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tiny_checkpoint: Path, segmenter: tuple[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncEngine]:
    """Three ranks, of an engine for which each death counts as the first."""
    with pytest.MonkeyPatch.context() as patch:
        shim(tmp_path_factory.mktemp("shim"), patch)
        async with start(tiny_checkpoint, segmenter=segmenter, workers_per_engine=3, hang_seconds=3.0) as engine:
            yield engine


async def test_edits_alone_have_the_bytes_that_one_rank_makes(engine: AsyncEngine, expected: dict[str, Told]) -> None:
    assert len(processes("worker")) == 3
    assert await run_each(engine, MIXED) == expected


async def until_whole(engine: AsyncEngine) -> list[psutil.Process]:
    """The workers, once all of them serve."""
    await until(lambda: all(rank.is_up for rank in ranks(engine)))
    return processes("worker")


def ranks(engine: AsyncEngine) -> tuple[RankStats, ...]:
    (stats,) = engine.stats
    assert stats is not None
    return stats.ranks


@pytest.mark.parametrize(
    ("rank", "fault"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (2, signal.SIGKILL), (0, signal.SIGSTOP)]
)
async def test_a_rank_that_dies_or_hangs_loses_nothing_and_takes_no_other_with_it(
    engine: AsyncEngine, expected: dict[str, Told], rank: int, fault: signal.Signals
) -> None:
    before = await until_whole(engine)
    deaths = count(engine, "rank_restarts")
    tasks = await begin(engine, MIXED)
    await asyncio.sleep(Random(rank).uniform(0, 0.3))
    before[rank].send_signal(fault)
    assert_alike(await ends(tasks), expected)
    if fault == signal.SIGSTOP:  # a rank that stopped while it had no work is noticed once it is given some
        async with asyncio.timeout(120):
            while count(engine, "rank_restarts") == deaths:
                assert_alike(await ends(await begin(engine, MIXED)), expected)
    await until(lambda: count(engine, "rank_restarts") == deaths + 1)
    after = await until_whole(engine)
    assert [number for number, pair in enumerate(zip(after, before, strict=True)) if len({*pair}) == 2] == [rank]
    assert not [victim for victim in before if victim not in after and is_there(victim)]
    assert count(engine, "engine_restarts") == count(engine, "request_retries") == 0


def is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def test_all_ranks_may_die_at_once(engine: AsyncEngine, expected: dict[str, Told]) -> None:
    deaths = count(engine, "rank_restarts")
    tasks = await begin(engine, MIXED)
    for worker in await until_whole(engine):
        worker.kill()
    await until(lambda: not engine.is_ready)
    assert_alike(await ends(tasks), expected)
    await until_whole(engine)
    await until(lambda: engine.is_ready)
    assert count(engine, "rank_restarts") == deaths + 3
    assert count(engine, "engine_restarts") == 0

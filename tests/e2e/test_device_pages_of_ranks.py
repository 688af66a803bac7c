"""An engine of two workers, each with a device tier (on a CPU: tensors of its own): pictures as with one worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from engines import serving_engine
from fault_kit import make_input

from core.config import CacheConfig, EngineConfig, ModelConfig, StencilConfig
from core.costs.load_report import CacheStats
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditReport

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOMY = 64 * 1024 * 1024
EDITS = [make_input(seed, steps=6, partial_images=1) for seed in (0, 1, 0, 1, 0)]


@asynccontextmanager
async def start(checkpoint: Path, workers: int, cache: CacheConfig) -> AsyncIterator[AsyncEngine]:
    model = ModelConfig(model=str(checkpoint), dtype="float32", threads=1)
    config = EngineConfig(models=(model,), workers_per_engine=workers, cache=cache)
    async with serving_engine(StencilConfig(engine=config)) as engine:
        yield engine


async def run_all(engine: AsyncEngine) -> tuple[list[list[bytes]], list[EditReport]]:
    """The edits one after the other: the files of each, and what was reported of it."""
    files: list[list[bytes]] = []
    reports: list[EditReport] = []
    for index, edit in enumerate(EDITS):
        async with engine.edit(f"r{index}", edit, engine.choose_model()) as outputs:
            told = [(bytes(output.data), output.report) async for output in outputs]
        files.append([data for data, _ in told])
        assert told[-1][1] is not None
        reports.append(told[-1][1])
    return files, reports


def cache_of(engine: AsyncEngine) -> CacheStats:
    (stats,) = engine.stats
    assert stats is not None
    return stats.cache


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tiny_checkpoint: Path) -> list[list[bytes]]:
    """The files of one worker that reads its pages in host memory."""
    async with start(tiny_checkpoint, 1, CacheConfig(host_bytes=ROOMY, device_bytes=0)) as engine:
        files, _ = await run_all(engine)
        return files


async def test_device_pages_of_the_first_of_two_workers_make_the_same_files(
    tiny_checkpoint: Path, expected: list[list[bytes]]
) -> None:
    async with start(tiny_checkpoint, 2, CacheConfig(host_bytes=ROOMY, device_bytes=ROOMY)) as engine:
        files, reports = await run_all(engine)
        assert files == expected
        assert [(report.cache, report.tier) for report in reports] == [("miss", None)] * 2 + [("hit", "device")] * 3
        cache = cache_of(engine)
        assert cache.budget_bytes["device"] == 2 * ROOMY, "each worker has as much"
        assert cache.used_bytes["device"] > 0


async def test_pages_that_leave_the_workers_device_are_loaded_or_primed_again(
    tiny_checkpoint: Path, expected: list[list[bytes]]
) -> None:
    async with start(tiny_checkpoint, 1, CacheConfig(host_bytes=ROOMY, device_bytes=ROOMY)) as engine:
        await run_all(engine)
        one_template = cache_of(engine).used_bytes["device"] // 2
    cache = CacheConfig(host_bytes=ROOMY, device_bytes=one_template * 5 // 4)
    async with start(tiny_checkpoint, 2, cache) as engine:
        files, _ = await run_all(engine)
        assert files == expected
        again, _ = await run_all(engine)
        assert again == expected
        stats = cache_of(engine)
        assert stats.evictions["device"] > 0
        assert stats.used_bytes["host"] > 0, "what was used twice went down"

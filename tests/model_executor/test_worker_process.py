"""A real worker process, driven the way the engine drives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from edits import SIZE, Edit

from core.config import EngineConfig, ModelConfig
from core.errors import ConfigError
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages import BatchResult, StepPlan, TensorKey, TensorRef, Transfer, TransferDone, WorkerFailed
from model_executor.executor import Executor

PATIENCE = 60.0
"""Seconds until a worker counts as hung."""


@asynccontextmanager
async def workers(checkpoint: Path, arena: Arena, number: int = 1) -> AsyncIterator[Executor]:
    """An executor whose workers are ready."""
    config = EngineConfig(
        models=(
            ModelConfig(model=str(checkpoint), served_model_name="tiny", dtype="float32", device="cpu", threads=1),
        ),
        workers_per_engine=number,
    )
    async with Executor(config, arena.id, arena.fd) as executor:
        models = await asyncio.wait_for(executor.ready(), PATIENCE)
        assert set(models) == {"tiny"}
        yield executor


async def answers(executor: Executor, plan: StepPlan, number: int) -> list[BatchResult | TransferDone]:
    """Submit `plan` and take so many messages; fails on a death or a failed item."""
    executor.submit(plan)
    messages = executor.results()
    taken = []
    for _ in range(number):
        message = await asyncio.wait_for(anext(messages), PATIENCE)
        assert isinstance(message, BatchResult | TransferDone), message
        if isinstance(message, BatchResult):
            assert [item.failure for item in message.items if item.failure] == []
        taken.append(message)
    return taken


async def run(executor: Executor, edit: Edit) -> np.ndarray:
    """All stages of one edit, one plan each."""
    plans = [edit.encode_plan(), *(edit.denoise_plan(step) for step in range(edit.steps)), edit.decode_plan()]
    for plan in plans:
        await answers(executor, plan, len(plan.batches))
    return edit.result()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(1, 1 << 24)
    yield arena
    arena.close()


async def test_edits_survive_each_other(tiny_checkpoint: Path, arena: Arena) -> None:
    """Two edits step for step in one worker give the bytes they give alone; a freed request leaves nothing behind."""
    space = ArenaAllocator(arena)
    async with workers(tiny_checkpoint, arena) as executor:
        alone = [await run(executor, Edit(arena, space, f"alone-{seed}", seed=seed)) for seed in (1, 2)]
        first, second = (Edit(arena, space, f"shared-{seed}", seed=seed) for seed in (1, 2))
        for plan in (first.encode_plan(), second.encode_plan()):
            await answers(executor, plan, 2)
        for step in range(first.steps):
            await answers(executor, StepPlan(seq=step, batches=(Edit.denoise_batch([first, second], step),)), 1)
        await answers(executor, first.decode_plan(), 1)
        await answers(executor, second.decode_plan(), 1)
        assert np.array_equal(first.result(), alone[0])
        assert np.array_equal(second.result(), alone[1])
        assert not np.array_equal(alone[0], alone[1])


async def test_decode_on_another_worker_gives_the_same_bytes(tiny_checkpoint: Path, arena: Arena) -> None:
    space = ArenaAllocator(arena)
    async with workers(tiny_checkpoint, arena, number=2) as executor:
        here = await run(executor, Edit(arena, space, "here", seed=3))
        there = Edit(arena, space, "there", seed=3)
        for plan in (there.encode_plan(), *(there.denoise_plan(step) for step in range(there.steps))):
            await answers(executor, plan, len(plan.batches))
        source = TensorRef(TensorKey("there", "image_encode", "latents"), 0, handle=there.latents)
        (done,) = await answers(executor, StepPlan(seq=0, transfers=(Transfer(source, 0),)), 1)
        assert isinstance(done, TransferDone)
        await answers(executor, there.decode_plan(rank=1, latents=done.ref), 1)
        assert np.array_equal(there.result(), here)


async def test_failed_item_is_a_message(tiny_checkpoint: Path, arena: Arena) -> None:
    """Work that cannot be done fails its item with a cause; the worker goes on."""
    space = ArenaAllocator(arena)
    async with workers(tiny_checkpoint, arena) as executor:
        stray = Edit(arena, space, "stray", seed=1)
        executor.submit(stray.denoise_plan(0))
        message = await asyncio.wait_for(anext(executor.results()), PATIENCE)
        assert isinstance(message, BatchResult)
        failure = message.items[0].failure
        assert failure is not None
        assert failure.kind == "engine"
        assert "holds no tensor text_encode.prompt_embeds of stray" in failure.message
        assert (await run(executor, Edit(arena, space, "next", seed=1))).shape == (SIZE[1], SIZE[0], 3)


async def test_worker_that_cannot_start_says_why(tmp_path: Path, arena: Arena) -> None:
    with pytest.raises(ConfigError, match="no model directory"):
        async with workers(tmp_path / "missing", arena):
            pass


async def test_killed_worker_is_reported(tiny_checkpoint: Path, arena: Arena) -> None:
    async with workers(tiny_checkpoint, arena) as executor:
        executor._workers[0]._process.kill()
        message = await asyncio.wait_for(anext(executor.results()), PATIENCE)
        assert isinstance(message, WorkerFailed)
        assert message.failure.kind == "engine_dead"

"""A real worker process, driven the way the engine drives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from edits import Edit

from core.config import EngineConfig, ModelConfig
from core.errors import ConfigError
from core.handles import ModelKey, TensorRef
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages import (
    BatchResult,
    StepPlan,
    Transfer,
    TransferDone,
    WorkerFailed,
)
from model_executor.executor import Executor

PATIENCE = 60.0
"""Seconds until a worker counts as hung."""


pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def workers(checkpoint: Path, arena: Arena, number: int) -> AsyncIterator[Executor]:
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


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena.create(1, 1 << 24)
    yield arena
    arena.close()


@pytest.fixture(scope="module")
def space(arena: Arena) -> ArenaAllocator:
    return ArenaAllocator(arena)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor(tiny_checkpoint: Path, arena: Arena) -> AsyncIterator[Executor]:
    """Two workers, shared by the tests that leave them as they were."""
    async with workers(tiny_checkpoint, arena, 2) as executor:
        yield executor


async def test_edits_survive_each_other(executor: Executor, arena: Arena, space: ArenaAllocator) -> None:
    """Two edits step for step in one worker give the bytes they give alone."""
    alone = [await run(executor, Edit(arena, space, f"alone-{seed}", seed=seed)) for seed in (1, 2)]
    first, second = (Edit(arena, space, f"shared-{seed}", seed=seed) for seed in (1, 2))
    for plan in (first.encode_plan(), second.encode_plan()):
        await answers(executor, plan, 2)
    for step in range(first.steps):
        batch = Edit.denoise_batch([first, second], {first: step, second: step})
        await answers(executor, StepPlan(seq=step, batches=(batch,)), 1)
    await answers(executor, first.decode_plan(), 1)
    await answers(executor, second.decode_plan(), 1)
    assert np.array_equal(first.result(), alone[0])
    assert np.array_equal(second.result(), alone[1])
    assert not np.array_equal(alone[0], alone[1])


async def test_decode_on_another_worker_gives_the_same_bytes(
    executor: Executor, arena: Arena, space: ArenaAllocator
) -> None:
    here = await run(executor, Edit(arena, space, "here", seed=3))
    there = Edit(arena, space, "there", seed=3)
    for plan in (there.encode_plan(), *map(there.denoise_plan, range(there.steps))):
        await answers(executor, plan, len(plan.batches))
    source = TensorRef(there.key("image_encode", "latents"), 0, handle=there.latents)
    (done,) = await answers(executor, StepPlan(seq=0, transfers=(Transfer(source, 0),)), 1)
    assert isinstance(done, TransferDone)
    await answers(executor, there.decode_plan(rank=1, latents=done.ref), 1)
    assert np.array_equal(there.result(), here)


async def test_failed_item_is_a_message(executor: Executor, arena: Arena, space: ArenaAllocator) -> None:
    """Work that cannot be done fails its item with a cause, also after a free; the worker goes on."""
    edit = Edit(arena, space, "stray", seed=1)
    for _ in range(2):
        executor.submit(edit.denoise_plan(0))
        message = await asyncio.wait_for(anext(executor.results()), PATIENCE)
        assert isinstance(message, BatchResult)
        failure = message.items[0].failure
        assert failure is not None
        assert failure.kind == "engine"
        assert "holds no tensor text_encode.prompt_embeds of stray" in failure.message
        await run(executor, edit)


async def test_components_are_loaded_and_unloaded(executor: Executor, arena: Arena, space: ArenaAllocator) -> None:
    edit = Edit(arena, space, "reloaded", seed=1)
    before = await run(executor, edit)
    key = ModelKey("tiny", "vae")
    executor.submit(StepPlan(seq=0, unload=(key,)))
    executor.submit(StepPlan(seq=1, load=(key,)))
    assert np.array_equal(await run(executor, edit), before)


async def test_worker_that_cannot_start_says_why(tmp_path: Path, arena: Arena) -> None:
    with pytest.raises(ConfigError, match="no model directory"):
        async with workers(tmp_path / "missing", arena, 1):
            pass


async def test_sigterm_is_left_to_the_parent(tiny_checkpoint: Path, arena: Arena, space: ArenaAllocator) -> None:
    """A supervisor signals the whole group, while running edits are to finish."""
    async with workers(tiny_checkpoint, arena, 1) as executor:
        executor._workers[0]._process.terminate()
        await run(executor, Edit(arena, space, "draining", seed=1))


async def test_killed_worker_is_reported(tiny_checkpoint: Path, arena: Arena) -> None:
    async with workers(tiny_checkpoint, arena, 1) as executor:
        executor._workers[0]._process.kill()
        message = await asyncio.wait_for(anext(executor.results()), PATIENCE)
        assert isinstance(message, WorkerFailed)
        assert message.failure.kind == "engine_dead"


async def test_plan_that_cannot_be_done_ends_the_worker_with_its_cause(tiny_checkpoint: Path, arena: Arena) -> None:
    """Components that no longer load are no request's fault: the worker says so and leaves."""
    async with workers(tiny_checkpoint, arena, 1) as executor:
        executor.submit(StepPlan(seq=0, load=(ModelKey("tiny", "unheard of"),)))
        message = await asyncio.wait_for(anext(executor.results()), PATIENCE)
        assert isinstance(message, WorkerFailed)
        assert "unheard of" in message.failure.message

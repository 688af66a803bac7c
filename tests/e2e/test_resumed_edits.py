"""Edits whose workers are killed half way: the picture has the bytes of an undisturbed run, and only the steps since
the last checkpoint are repeated. With samplers that have a state, alone, so that not even rounding may differ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from diffusers import EulerAncestralDiscreteScheduler, PNDMScheduler
from fault_kit import Told, count, make_input, processes, run, start, until

from core.costs.load_report import EngineStats
from core.scheduling.recovery.checkpoints import MAX_ROUNDS
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput
from tools.random_unet_checkpoints import make_sd, make_sdxl

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = 40
PNDM = {"skip_prk_steps": True, "prediction_type": "v_prediction"}
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "one that draws noise at every step": lambda path: make_sdxl(path, scheduler_class=EulerAncestralDiscreteScheduler),
    "one that remembers four predictions": lambda path: make_sd(
        path, in_channels=9, scheduler_class=PNDMScheduler, scheduler=PNDM, use_linear_projection=True
    ),
}
"""What is said of the sampler -> a checkpoint with it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CHECKPOINTS)
async def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncEngine]:
    """Two ranks."""
    checkpoint = CHECKPOINTS[request.param](tmp_path_factory.mktemp("model") / "checkpoint")
    async with start(checkpoint, workers_per_engine=2) as engine:
        yield engine


def edit_with(**sampling: Any) -> EditInput:
    """It shows its picture once, half way."""
    edit = make_input(steps=STEPS, partial_images=1, side=128)
    return replace(edit, sampling=msgspec.structs.replace(edit.sampling, **sampling))


@pytest.mark.parametrize(
    ("edit", "all_die"),
    [
        (edit_with(mask_aware=False, guidance_scale=1.0), False),
        (edit_with(mask_aware=False, negative_prompt="a hat", guidance_scale=5.0), False),
        (edit_with(guidance_scale=5.0), True),
    ],
    ids=["exact", "exact and guided", "mask-aware and guided, all ranks die"],
)
async def test_an_edit_goes_on_from_its_last_checkpoint(engine: AsyncEngine, edit: EditInput, all_die: bool) -> None:
    expected = await run(engine, "undisturbed", edit)
    before = stats_of(engine)
    assert await run_and_kill(engine, edit, all_die=all_die) == expected
    await until(lambda: deaths(stats_of(engine)) > deaths(before))
    assert stats_of(engine).steps_repeated - before.steps_repeated <= MAX_ROUNDS + 1
    assert count(engine, "engine_restarts") == count(engine, "request_retries") == 0


async def run_and_kill(engine: AsyncEngine, edit: EditInput, *, all_die: bool) -> Told:
    """What an edit says, if the worker that does its steps, or all, are killed when it has shown its picture. No worker
    primes an earlier result meanwhile: its death would be a second case of what ends workers.
    """
    told: Told = []
    await until(lambda: all(rank.is_up for rank in stats_of(engine).ranks) and not priming_seconds(engine))
    async with engine.edit("killed", edit, engine.choose_model()) as outputs:
        async for output in outputs:
            told.append((output.partial_index, bytes(output.data)))
            if output.partial_index == 0:
                for worker in processes("worker")[: None if all_die else 1]:
                    worker.kill()
    return told


def stats_of(engine: AsyncEngine) -> EngineStats:
    (stats,) = engine.stats
    assert stats is not None
    return stats


def priming_seconds(engine: AsyncEngine) -> float:
    (load,) = engine.loads
    return 0.0 if load is None else load.priming_seconds


def deaths(stats: EngineStats) -> int:
    return sum(rank.deaths for rank in stats.ranks)

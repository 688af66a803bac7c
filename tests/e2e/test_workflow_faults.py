"""Edits through a user's class on ranks that die, with a full disk for pages, and beside a class that ends ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from disks import fill, mounted_tmpfs
from engines import serving_engine
from fault_kit import count, make_input, processes, until
from run_workflows import CLASSES, DIAMOND, GUARDED

from core.config import CacheConfig, EngineConfig, ModelConfig, StencilConfig
from core.errors import EngineDeadError, ModelUnavailableError, RunError
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput
from engine.client.resolve.bound_model import BoundModel
from engine.client.run_input import RunInput
from entrypoints.workflows.workflow_files import read_sent

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "workflows"
STEPS = 80
"""So many that a rank can be killed between two of them, and that good ones follow."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    async with served(tiny_checkpoint, tmp_path_factory.mktemp("disk") / "pages") as serving:
        yield serving


@pytest_asyncio.fixture(loop_scope="module")
async def new_engine(tiny_checkpoint: Path, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    """No worker of it has died: with those of two tests in a row it would be given up."""
    async with served(tiny_checkpoint, tmp_path / "pages") as serving:
        yield serving


@asynccontextmanager
async def served(tiny_checkpoint: Path, folder: Path) -> AsyncIterator[AsyncEngine]:
    """Two ranks, and a disk for pages without room for one."""
    common = {"model": str(tiny_checkpoint), "dtype": "float32", "device": "cpu"}
    models = tuple(
        ModelConfig(served_model_name=name, workflow=workflow, threads=1, **common)  # type: ignore[arg-type]
        for name, workflow in (("plain", ""), ("guarded", "guarded"))
    )
    with mounted_tmpfs(folder, 2**16) as disk:
        fill(disk / "full")
        config = EngineConfig(
            models=models,
            workers_per_engine=2,
            classes=CLASSES,
            workflows=(GUARDED, DIAMOND),
            cache=CacheConfig(disk_bytes=2**26, directory=str(disk)),
        )
        async with serving_engine(StencilConfig(engine=config, arena_bytes=2**27)) as serving:
            yield serving


async def edited(engine: AsyncEngine, model: str, edit: EditInput) -> bytes:
    """The file of the final picture."""
    async with engine.edit(f"{model}-{id(edit)}", edit, engine.choose_model(model)) as outputs:
        return [bytes(output.data) async for output in outputs][-1]


def asked(seed: int, prompt: str = "a hat") -> EditInput:
    return replace(make_input(seed, STEPS, prompt, side=96), owner=f"owner {seed}")


async def test_edits_through_a_class_end_with_the_same_bits_when_ranks_die_and_the_disk_is_full(
    engine: AsyncEngine,
) -> None:
    edits = [asked(seed) for seed in range(2)]
    expected = [await edited(engine, "guarded", edit) for edit in edits]
    assert expected[0] == await edited(engine, "plain", edits[0])
    before = count(engine, "rank_restarts")
    for number, edit in enumerate(edits, 1):
        task = asyncio.create_task(edited(engine, "guarded", edit))
        await until(lambda: engine.num_requests_running == 1)
        await asyncio.sleep(0.05 * number)
        assert not task.done(), "nothing would die during it"
        for worker in processes("worker")[:number]:
            worker.kill()
        assert await asyncio.wait_for(task, 60) == expected[number - 1]
        await until(lambda: engine.is_ready)
    await until(lambda: count(engine, "rank_restarts") - before == 3)  # it is reported within a second
    assert count(engine, "cache_failed_stores") > 0, "the disk was to be full"


async def test_a_class_that_raises_fails_its_edit_alone(engine: AsyncEngine) -> None:
    good, expected = asked(5), await edited(engine, "guarded", asked(5))
    tasks = [asyncio.create_task(edited(engine, "guarded", edit)) for edit in (good, asked(6, "raise"))]
    assert await tasks[0] == expected
    with pytest.raises(RunError, match="node guard: class guard raised ValueError: it will not"):
        await tasks[1]


DEADLY = """
import os

class Deadly(Safety):
    def execute(self, image, most_red):
        os._exit(3)

with Workflow"""


async def test_a_workflow_that_was_added_is_refused_by_its_class_and_others_go_on(engine: AsyncEngine) -> None:
    text = (EXAMPLES / "guarded.py").read_text().replace('name="guarded"', 'name="deadly"')
    text = text.replace("\nwith Workflow", DEADLY).replace("checked = Safety()", "checked = Deadly()")
    read = await read_sent(text)
    await engine.register_workflows(read.workflows, read.classes, BoundModel("plain"))
    plain = asked(17)
    expected = await edited(engine, "plain", plain)
    other = asyncio.create_task(edited(engine, "guarded", plain))
    asked_for = replace(asked(18), inputs={"most_red": 0.0})
    with pytest.raises(EngineDeadError, match="3 workers died while running this request"):
        await edited(engine, "deadly", asked_for)
    for owner in ("owner 18", "another"):
        with pytest.raises(ModelUnavailableError, match=r"class workflow_\w+:Deadly|exit code 3"):
            await edited(engine, "deadly", replace(asked_for, owner=owner))
    assert await other == await edited(engine, "plain", plain) == expected
    assert [model.name for model in engine.models.values()] == ["plain", "guarded", "plain"]
    engine.remove_workflow("deadly")
    await until(lambda: count(engine, "model_quarantined") == 0)
    assert count(engine, "engine_restarts") == 0


async def test_a_class_that_ends_ranks_is_refused_and_other_workflows_go_on(new_engine: AsyncEngine) -> None:
    plain, run = asked(7), RunInput(workflow="diamond", inputs={"vector": np.ones(4, np.float32)})
    expected, summed = await edited(new_engine, "plain", plain), await new_engine.run("before", run)
    other = asyncio.create_task(edited(new_engine, "plain", plain))
    with pytest.raises(EngineDeadError, match="3 workers died while running this request"):
        await edited(new_engine, "guarded", asked(8, "deadly"))
    with pytest.raises(ModelUnavailableError, match="killed by signal 9"):
        await edited(new_engine, "guarded", asked(9, "deadly"))
    with pytest.raises(ModelUnavailableError, match="class guard is not run for a while"):
        await edited(new_engine, "guarded", asked(10))
    assert await other == await edited(new_engine, "plain", plain) == expected
    assert np.array_equal((await new_engine.run("after", run))["sum"], summed["sum"])
    await until(lambda: count(new_engine, "model_quarantined") == 1)  # which its statistics and the log name
    assert count(new_engine, "engine_restarts") == 0

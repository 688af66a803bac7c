"""Workflows of users' classes on real workers: what they make, what fails, and what deaths and aborts leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
from engines import serving_engine
from fault_kit import processes, until
from run_workflows import BROKEN, CLASSES, DOUBLING, SLEEPING, TELLING, WAYWARD, random_inputs, random_workflow
from user_classes import alone, same

from core.config import EngineConfig, ModelConfig, SchedulerConfig, StencilConfig
from core.errors import DeadlineExceededError, InvalidRequestError, ModelUnavailableError, RunError
from core.graph.workflow import Workflow
from core.scheduling.ranks.quarantine import GOOD_BATCHES
from engine.client.async_engine import AsyncEngine
from engine.client.run_input import RunInput

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKFLOWS = [random_workflow(Random(seed), f"w{seed}", 1 + seed % 9) for seed in range(20)]
HASTE: dict[str, Any] = {"wayward": {"seconds": 0.2}, "sleeper": {"load_seconds": 0.2}}
HASTY = tuple(msgspec.structs.replace(each, **HASTE.get(each.name, {})) for each in CLASSES)


def config_of(checkpoint: Path, num_ranks: int) -> StencilConfig:
    model = ModelConfig(model=str(checkpoint), served_model_name="tiny", dtype="float32", device="cpu", threads=1)
    return StencilConfig(
        engine=EngineConfig(
            models=(model,),
            scheduler=SchedulerConfig(max_retries=100),
            workers_per_engine=num_ranks,
            classes=HASTY,
            workflows=(*WORKFLOWS, WAYWARD, TELLING, SLEEPING, BROKEN, DOUBLING),
        )
    )


@pytest_asyncio.fixture(params=[1, 3], scope="module", loop_scope="module")
async def engine(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    async with serving_engine(config_of(tiny_checkpoint, request.param)) as engine:
        yield engine


async def wayward(engine: AsyncEngine, how: str, **more: Any) -> dict[str, Any]:
    return await engine.run(f"{how}-{id(more)}", RunInput(workflow="wayward", inputs={"how": how}, **more))


async def test_two_hundred_runs_make_what_they_make_alone_whatever_dies_or_is_aborted(engine: AsyncEngine) -> None:
    random = Random(1)
    asked: list[tuple[Workflow, dict[str, Any]]] = []
    running: list[asyncio.Task[dict[str, Any]]] = []
    for index in range(200):
        workflow, inputs = random.choice(WORKFLOWS), random_inputs(random)
        asked.append((workflow, inputs))
        request = RunInput(workflow=workflow.name, inputs=inputs)
        running.append(asyncio.create_task(engine.run(f"run-{index}", request)))
        if random.random() < 0.1:
            running[random.randrange(index + 1)].cancel()
        if index in (60, 120):
            await asyncio.sleep(0.02)
            psutil.Process(random.choice(processes("worker")).pid).kill()
        await asyncio.sleep(random.choice([0, 0, 0.003]))
    results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 120)
    finished = [(each, made) for each, made in zip(asked, results, strict=True) if isinstance(made, dict)]
    assert all(isinstance(made, dict | asyncio.CancelledError) for made in results)
    assert len(finished) > 150
    for (workflow, inputs), made in finished:
        expected = alone(workflow, inputs)
        assert made.keys() == expected.keys()
        assert all(same(made[name], expected[name]) for name in made), workflow
    await until(lambda: engine.services.arena.used_bytes == 0, 10)
    await until(lambda: engine.is_ready, 10)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "class wayward raised ValueError: it will not"),
        ("exit", "class wayward raised SystemExit: 3"),
        ("panic", "class wayward raised Panic: unwrap on None"),
        ("shape", r"output y of class wayward: its shape is \[17\], and tensor float32 up to \[16\] is declared"),
        ("sides", r"output y of class wayward: its shape is \[2, 2\]"),
        ("dtype", "output y of class wayward: it is float64, and float32 is declared"),
        ("finite", "output y of class wayward: not all of its numbers are finite"),
        ("type", "output y of class wayward: it is a list"),
        ("sparse", "output y of class wayward: it is a Tensor"),
        ("meta", "output y of class wayward: it is on the device meta, where tensors have no content"),
        ("nested", "output y of class wayward cannot be read: RuntimeError"),
        ("gone", "what class wayward returned cannot be read: KeyError: 'it is gone'"),
        ("name", "lacks its output y"),
        ("more", "returned 'z', and y are declared"),
        ("list", "returned list, and a dict of outputs is due"),
        ("nothing", "returned NoneType"),
    ],
)
async def test_what_is_not_as_declared_fails_its_request_with_node_and_cause(
    engine: AsyncEngine, how: str, cause: str
) -> None:
    with pytest.raises(RunError, match=f"^node does: .*{cause}"):
        await wayward(engine, how)
    assert set(await wayward(engine, "fine")) == {"y"}


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("beyond", "output count of class teller: it is no integer of 64 bits"),
        ("truth", "output count of class teller: it is a bool, and integer is declared"),
        ("surrogate", "output type of class teller: it is no text in UTF-8: surrogates not allowed"),
    ],
)
async def test_a_plain_output_is_as_declared(engine: AsyncEngine, how: str, cause: str) -> None:
    with pytest.raises(RunError, match=f"^node tells: {cause}"):
        await engine.run(how, RunInput(workflow="telling", inputs={"how": how}))


async def test_a_literal_int_is_a_float_where_a_number_is_declared(engine: AsyncEngine) -> None:
    made = await engine.run("most", RunInput(workflow="telling", inputs={"how": "most"}))
    assert made == {"count": 2**63 - 1, "type": "float"}


async def test_a_run_beyond_its_time_limit_fails_alone(engine: AsyncEngine) -> None:
    """Five times, as a lone worker that keeps dying by itself would end its engine. Others run between, so that the
    class is not refused.
    """
    for index in range(5 if len(processes("worker")) == 1 else 1):
        slow = asyncio.create_task(wayward(engine, "sleep20"))
        await asyncio.sleep(0.05)
        other = asyncio.create_task(wayward(engine, "fine"))
        with pytest.raises(RunError, match=r"^node does: class wayward took longer than its 0\.2 s"):
            await asyncio.wait_for(slow, 60)
        assert set(await asyncio.wait_for(other, 60)) == {"y"}, index
        for _ in range(GOOD_BATCHES):
            assert set(await wayward(engine, "fine")) == {"y"}


async def test_an_owner_whose_runs_keep_passing_their_time_limit_is_refused_alone(engine: AsyncEngine) -> None:
    for _ in range(2):
        with pytest.raises(RunError, match=r"class wayward took longer than its 0\.2 s"):
            await asyncio.wait_for(wayward(engine, "sleep20", owner="slow"), 60)
    with pytest.raises(ModelUnavailableError, match=r"^class wayward is not run for this owner for a while") as caught:
        await wayward(engine, "fine", owner="slow")
    assert 0 < caught.value.retry_after <= 10
    assert set(await asyncio.wait_for(wayward(engine, "fine"), 60)) == {"y"}


async def test_a_load_beyond_its_time_limit_fails_its_requests_and_is_not_tried_at_once(engine: AsyncEngine) -> None:
    for _ in range(2):
        cause = r"sleeper \(user_classes:Sleeper\): loading took longer than its 0\.2 s"
        with pytest.raises(ModelUnavailableError, match=cause) as caught:
            await asyncio.wait_for(engine.run("long", RunInput(workflow="sleeping")), 60)
        assert 0 < caught.value.retry_after <= 10, "a second try would have doubled it"
    assert set(await asyncio.wait_for(wayward(engine, "fine"), 60)) == {"y"}


async def test_a_loop_runs_as_often_as_the_request_says(engine: AsyncEngine) -> None:
    vector = np.arange(4, dtype=np.float32)
    made = await engine.run("loop", RunInput(workflow="doubling", inputs={"vector": vector}, rounds=(3,)))
    assert same(made["sum"], 9 * vector)


async def test_a_run_whose_timeout_passes_is_aborted(engine: AsyncEngine) -> None:
    with pytest.raises(DeadlineExceededError):
        await wayward(engine, "sleep0.15", timeout=0.1)
    await until(lambda: engine.services.arena.used_bytes == 0, 10)


async def test_a_class_that_cannot_be_loaded_fails_its_requests(engine: AsyncEngine) -> None:
    for _ in range(2):
        with pytest.raises(ModelUnavailableError, match=r"broken \(user_classes:Broken\): OSError: its file is gone"):
            await engine.run("lost", RunInput(workflow="broken"))
    assert set(await wayward(engine, "fine")) == {"y"}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (RunInput(workflow="none"), "workflow"),
        (RunInput(workflow="inpaint"), "workflow"),
        (RunInput(workflow="wayward"), "how"),
        (RunInput(workflow="wayward", inputs={"how": 1}), "how"),
        (RunInput(workflow="wayward", inputs={"how": "x" * 17}), "how"),
        (RunInput(workflow="wayward", inputs={"how": "\ud800"}), "how"),
        (RunInput(workflow="wayward", inputs={"how": "fine", "else": 1}), "else"),
        (RunInput(workflow="wayward", inputs={"how": "fine"}, rounds=(1,)), "rounds"),
    ],
)
async def test_inputs_are_checked_at_the_door(engine: AsyncEngine, asked: RunInput, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await engine.run("wrong", asked)
    assert caught.value.param == param
    await until(lambda: engine.services.arena.used_bytes == 0, 10)

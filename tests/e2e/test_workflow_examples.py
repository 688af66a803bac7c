"""The workflows of examples/workflows on real workers: what they make is what their models make, called in a row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from engines import serving_engine
from fault_kit import processes, until
from workflow_texts import SOUND

from core.config import EngineConfig, ModelConfig, SchedulerConfig, StencilConfig
from core.errors import InvalidRequestError, RunError
from core.graph.form import text
from core.graph.op import Port
from core.graph.workflow import Edge, Node, Workflow
from core.run_class import RunClass
from engine.client.async_engine import AsyncEngine
from engine.client.run_input import RunInput
from entrypoints.workflows.registered import Registered
from entrypoints.workflows.workflow_files import read_workflows

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "workflows"


CHOOSING = f"""{SOUND.replace("NAME", "twice")}
import time
from entrypoints.workflows import choose, steps, text

class Slow(Twice):
    def execute(self, x):
        time.sleep(0.02)
        return {{"y": x + 1}}

class Late(Slow):
    def setup_io(self):
        self.add_input("x", int)
        self.add_input("late", int, deferred=True)
        self.add_output("y", int)

    def execute(self, x, late):
        return {{"y": x + 10 * late}}

with Workflow(name="late") as late:
    x = late.add_input("x", int)
    for step in steps(3):
        x = Late()(x, Slow()(x))
    late.add_output(x, name="y")

with Workflow(name="choosing") as workflow:
    left, right = (workflow.add_input(name, int) for name in ("left", "right"))
    verdict = workflow.add_input("verdict", text(8))
    workflow.add_output(choose(verdict, left=lambda: left, right=lambda: right), name="chosen")
    workflow.add_output(left, name="left")
"""

WORD = text(64)
READING = Node(
    "left", "run", (Edge("pick", "chosen"),), role="same", takes=(port := Port.of("chosen", WORD),), makes=(port,)
)
PICKING = Workflow(
    "picking",
    (
        replace(READING, name="pick", inputs=(), given={"chosen": "reader"}, chooses=True),
        READING,
        replace(READING, name="right"),
        Node(
            "end",
            "run",
            (Edge("left", "chosen", "left"), Edge("right", "chosen", "right")),
            role="join",
            joins=True,
            takes=tuple(Port.of(name, WORD, is_optional=True) for name in ("left", "right")),
            makes=(Port.of("value", WORD),),
        ),
    ),
    {"value": "end"},
    output_ports={"value": "value"},
    inputs=(Port.of("reader", WORD),),
)
"""The request itself names the reader that runs."""

BUILT_IN = tuple(
    RunClass(name=name.lower(), path=f"entrypoints.workflows.built_in:{name}") for name in ("Same", "Join")
)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Registered:
    """With a file that is gone when workers start."""
    file = tmp_path_factory.mktemp("workflows") / "choosing.py"
    file.write_text(CHOOSING)
    read = read_workflows([EXAMPLES, file])
    file.unlink()
    return Registered.together([read, Registered((PICKING,), BUILT_IN)])


@pytest_asyncio.fixture(params=[1, 3], scope="module", loop_scope="module")
async def engine(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, examples: Registered
) -> AsyncIterator[AsyncEngine]:
    model = ModelConfig(model=str(tiny_checkpoint), served_model_name="tiny", dtype="float32", device="cpu", threads=1)
    config = EngineConfig(
        models=(model,),
        scheduler=SchedulerConfig(max_retries=100),
        workers_per_engine=request.param,
        classes=examples.classes,
        workflows=examples.workflows,
    )
    async with serving_engine(StencilConfig(engine=config)) as engine:
        yield engine


def module_of(name: str) -> ModuleType:
    """An example, run in this process."""
    path = EXAMPLES / f"{name}.py"
    module = ModuleType(name)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


def called(module: ModuleType, kind: str, settings: Mapping[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    model = getattr(module, kind)(**settings or {})
    model.load("cpu", torch.float32)
    made: dict[str, Any] = model.execute(**inputs)
    return made


def expected(name: str, image: np.ndarray[Any, Any], num_steps: int) -> dict[str, Any]:
    """What the models of an example make, one called after the other."""
    module, picture = module_of(name), torch.from_numpy(image.copy())
    if name == "safety":
        return called(module, "Safety", image=picture, most_red=80.0)
    if name == "two_models":
        for power in (0.5, 3.0):
            picture = called(module, "Tone", {"power": power}, image=picture)["image"]
    if name == "branch" and called(module, "Judge", image=picture)["verdict"] == "dark":
        picture = called(module, "Lighten", image=picture)["image"]
    if name == "loop":
        heat = called(module, "Encode", image=picture)["latents"]
        for step in range(num_steps):
            heat = called(module, "Spread", heat=heat, step=step)["spread"]
        picture = called(module, "Decode", latents=heat)["picture"]
    return {"picture": picture}


def asked(random: Random) -> tuple[str, np.ndarray[Any, Any], int, RunInput]:
    rng = np.random.default_rng(random.randrange(1 << 30))
    name = random.choice(["safety", "two_models", "branch", "loop"])
    sides, brightest = (random.randint(1, 24), random.randint(1, 24), 3), random.choice([120, 256])
    image = rng.integers(0, brightest, sides, np.uint8) // np.array([1, *random.choice([(1, 1), (9, 9)])], np.uint8)
    num_steps = random.randint(1, 4)
    inputs: dict[str, Any] = {"image": image} | ({"num_steps": num_steps} if name == "loop" else {})
    return name, image, num_steps, RunInput(workflow=name, inputs=inputs)


def is_same(made: Any, wanted: Any) -> bool:
    return np.array_equal(made, wanted.numpy()) if isinstance(wanted, torch.Tensor) else made is wanted


async def test_the_examples_make_what_their_models_make_also_after_a_death(engine: AsyncEngine) -> None:
    """When a worker dies, the classes are loaded: a death while a class is being loaded is held against it."""
    random = Random(3)
    runs = [asked(random) for _ in range(60)]
    running = []
    for index, (*_, request) in enumerate(runs):
        running.append(asyncio.create_task(engine.run(f"run-{index}", request)))
        if index == 30:
            await asyncio.wait(running)
        if index == 50:
            await asyncio.sleep(0.02)
            psutil.Process(random.choice(processes("worker")).pid).kill()
    results = await asyncio.wait_for(asyncio.gather(*running), 120)
    seen = set()
    for (name, image, num_steps, _), made in zip(runs, results, strict=True):
        wanted = expected(name, image, num_steps)
        assert made.keys() == wanted.keys()
        assert all(is_same(made[each], wanted[each]) for each in made), name
        seen.add((name, np.array_equal(made["picture"], image)))
    assert {("branch", True), ("branch", False), ("safety", True), ("safety", False)} <= seen
    await until(lambda: engine.services.arena.used_bytes == 0, 10)


@pytest.mark.parametrize("num_steps", [0, 201])
async def test_a_number_of_rounds_is_checked_at_the_door(engine: AsyncEngine, num_steps: int) -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    with pytest.raises(InvalidRequestError) as caught:
        await engine.run("wrong", RunInput(workflow="loop", inputs={"image": image, "num_steps": num_steps}))
    assert caught.value.param == "num_steps"


async def test_an_input_may_come_late(engine: AsyncEngine) -> None:
    results = await asyncio.gather(
        *(engine.run(f"late-{x}", RunInput(workflow="late", inputs={"x": x})) for x in range(8))
    )
    expected = list(range(8))
    for _ in range(3):
        expected = [x + 10 * (x + 1) for x in expected]
    assert results == [{"y": each} for each in expected]


async def test_a_text_that_names_no_branch_fails_its_request(engine: AsyncEngine) -> None:
    for verdict in ("left", "right"):
        asked = RunInput(workflow="choosing", inputs={"verdict": verdict, "left": 1, "right": 2})
        assert await engine.run(verdict, asked) == {"chosen": 1 + (verdict == "right"), "left": 1}
    with pytest.raises(RunError, match=r"node choice: .* told to choose 'up', and its branches are left, right"):
        await engine.run("up", RunInput(workflow="choosing", inputs={"verdict": "up", "left": 1, "right": 2}))


async def test_a_class_that_chooses_no_reader_fails_its_request(engine: AsyncEngine) -> None:
    assert await engine.run("left", RunInput(workflow="picking", inputs={"reader": "left"})) == {"value": "left"}
    with pytest.raises(RunError, match="node pick: class same chose 'end', and left, right read what it makes"):
        await engine.run("end", RunInput(workflow="picking", inputs={"reader": "end"}))


async def test_malformed_inputs_are_refused_at_the_door(engine: AsyncEngine) -> None:
    """Random values for inputs of all workflows: what is refused names an input, and nothing of it is left."""
    random, values = Random(8), (None, 1, -1, 0.5, True, "word", "\ud800", b"x", [1], {}, float("nan"), 2**70)
    arrays = (
        np.zeros((2, 2, 3)),
        np.zeros((2, 2), np.uint8),
        np.zeros((3000, 1, 3), np.uint8),
        np.zeros((0, 2, 3), "f"),
    )
    refused, known = list[str | None](), set[str]()
    for index in range(1000):
        workflow = random.choice([each for each in engine.config.engine.workflows if not each.is_for_pictures])
        names = [port.name for port in workflow.inputs] + ["other"]
        inputs = {
            name: random.choice((*values, *arrays)) for name in random.sample(names, random.randint(0, len(names)))
        }
        try:
            await engine.run(f"odd-{index}", RunInput(workflow=workflow.name, inputs=inputs))  # type: ignore[arg-type]
        except InvalidRequestError as error:
            refused.append(error.param)
            known |= {*names, "inputs"}
        except RunError:
            assert workflow.name in ("choosing", "picking"), "all else is as declared"
    assert len(refused) > 800
    assert known.issuperset(filter(None, refused))
    assert None not in refused
    await until(lambda: engine.services.arena.used_bytes == 0, 10)


async def test_rounds_that_the_workflow_says_are_not_given_apart(engine: AsyncEngine) -> None:
    inputs: dict[str, Any] = {"image": np.zeros((2, 2, 3), np.uint8), "num_steps": 1}
    with pytest.raises(InvalidRequestError) as caught:
        await engine.run("twice", RunInput(workflow="loop", inputs=inputs, rounds=(1,)))
    assert caught.value.param == "rounds"

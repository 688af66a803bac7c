"""Real worker processes: any workflow, on ranks drawn at random, makes what it makes alone on one rank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from any_ranks import AnyRanks
from workflows import ACCEPTANCE, TOY

from core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from core.graph.op import OPS
from core.graph.workflow import Workflow
from core.graph.workflows.inpaint import INPAINT
from core.handles import PAGE_ARENA, VALUE_ARENA, ArrayRef, Artefact
from core.ipc.shared_array import Arena, ArenaAllocator, carve
from core.messages.engine import (
    Abort,
    Aborted,
    Drain,
    EngineFailed,
    EngineOutputs,
    EngineRequest,
    Finished,
    FromEngine,
    Output,
)
from core.messages.specs import EditSpec
from core.messages.worker import Addition, Removal, StepPlan
from core.model_info import ModelInfo
from core.run_class import RunClass
from core.sampling_params import SamplingParams
from core.scheduling.scheduler import StepScheduler
from engine.client.processes.worker_launcher import worker_launcher
from engine.engine_core.engine_core import EngineCore
from model_executor.executor import Executor

SIDE, TOKEN = 96, 16
PATIENCE = 120.0


@pytest.fixture(autouse=True, scope="module")
def toy() -> Iterator[None]:
    OPS.register(TOY)
    yield
    OPS.unregister(TOY.name)


class Recorder:
    """Passes plans on to the workers, and keeps them."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._executor.submit(plan)

    def tell(self, rank: int, message: Addition | Removal) -> None:
        self._executor.tell(rank, message)

    def kill(self, rank: int) -> None:
        self._executor.kill(rank)

    def restart(self, rank: int, wait_seconds: float) -> None:
        self._executor.restart(rank, wait_seconds)


class Engine:
    """An EngineCore in this process with real workers."""

    def __init__(self, core: EngineCore, recorder: Recorder, info: ModelInfo, arena: Arena) -> None:
        self.core, self.info, self.arena = core, info, arena
        self.outputs: dict[str, Output] = {}
        self.recorder = recorder
        self._space = ArenaAllocator(arena)
        random = np.random.default_rng(0)
        self._template = self._share(random.integers(0, 256, (SIDE, SIDE, 3), np.uint8))
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[34:60, 34:60] = 1
        self._mask, self._active = self._share(mask), self._share(np.arange(9, dtype=np.int32))

    def request(
        self, name: str, workflow: Workflow, rounds: Sequence[int], seed: int, previews: int = 0
    ) -> EngineRequest:
        picture = np.zeros((SIDE, SIDE, 3), np.uint8)
        return EngineRequest(
            request_id=name,
            model=self.info.name,
            arrival=time.monotonic(),
            workflow=workflow.name,
            rounds=tuple(rounds),
            spec=EditSpec(
                prompt="a red hat",
                sampling=SamplingParams(num_inference_steps=max([1, *rounds]), guidance_scale=30.0, seed=seed),
                width=SIDE,
                height=SIDE,
                template=self._template,
                mask=self._mask,
                active=self._active,
                content_id="0" * 16,
                num_tokens=(SIDE // TOKEN) ** 2,
                max_text_tokens=self.info.max_text_tokens,
                outputs={"picture": Artefact(self._share(picture))},
                previews=tuple(Artefact(self._share(picture)) for _ in range(previews)),
            ),
        )

    def _share(self, array: npt.NDArray[np.generic]) -> ArrayRef:
        ref = carve(self._space.alloc(array.nbytes), 0, array.shape, array.dtype.name)
        self.arena.view(ref)[...] = array
        return ref

    def picture(self, request: EngineRequest) -> bytes:
        return self.arena.view(request.spec.pixels).tobytes()

    def emit(self, message: FromEngine) -> None:
        assert isinstance(message, EngineOutputs | EngineFailed)
        for output in message.outputs:
            if not hasattr(output, "index"):
                assert output.request_id not in self.outputs, "two terminal outputs"
                self.outputs[output.request_id] = output


@asynccontextmanager
async def engine(checkpoint: Path, num_ranks: int, seed: int | None) -> AsyncIterator[Engine]:
    """seed: of a policy that draws ranks; None: the default policy."""
    model = ModelConfig(model=str(checkpoint), served_model_name="tiny", dtype="float32", device="cpu", threads=1)
    toys = RunClass(name="toys", path="toy_worker:Toys")
    config = EngineConfig(models=(model,), workers_per_engine=num_ranks, cache=CacheConfig(), classes=(toys,))
    with (
        closing(Arena.create(0, 1 << 26)) as arena,
        closing(Arena.create(PAGE_ARENA, 1 << 20)) as pages,
        closing(Arena.create(VALUE_ARENA, 1 << 26)) as values,
        worker_launcher.used() as launcher,
    ):
        config = msgspec.structs.replace(config, launcher=launcher)
        async with Executor(config, arena.handle, pages.handle, values.handle) as executor:
            models = await asyncio.wait_for(executor.ready(), PATIENCE)
            scheduler = StepScheduler(SchedulerConfig(max_num_seqs=16), models, num_ranks)
            scheduler.workflows[ACCEPTANCE.name] = ACCEPTANCE
            scheduler.learn(executor.cost_samples, ports=executor.ports)
            if seed is not None:
                scheduler._policy = AnyRanks(Random(seed))
            made: list[Engine] = []
            recorder = Recorder(executor)
            core = EngineCore(scheduler, recorder, lambda message: made[0].emit(message) if made else None)
            made.append(Engine(core, recorder, models["tiny"], arena))
            feeder = asyncio.create_task(feed(executor, core))
            try:
                yield made[0]
            finally:
                feeder.cancel()


async def feed(executor: Executor, core: EngineCore) -> None:
    async for message in executor.results():
        core.mailbox.put_nowait(message)


def kinds() -> list[tuple[Workflow, tuple[int, ...], int]]:
    """(workflow, rounds, seed) of the requests of this test: each several times among the 200."""
    random = Random(1)
    toys = [(ACCEPTANCE, (random.randint(1, 4), random.randint(1, 4)), random.randint(0, 9)) for _ in range(24)]
    return toys + [(INPAINT, (random.randint(1, 3),), random.randint(0, 9)) for _ in range(6)]


async def pictures_alone(checkpoint: Path) -> dict[tuple[str, tuple[int, ...], int], bytes]:
    made = {}
    async with engine(checkpoint, 1, None) as lone:
        running = asyncio.create_task(lone.core.run())
        for workflow, rounds, seed in kinds():
            request = lone.request(f"{workflow.name}-{rounds}-{seed}", workflow, rounds, seed)
            lone.core.mailbox.put_nowait(request)
            while request.request_id not in lone.outputs:
                await asyncio.sleep(0.002)
            assert isinstance(lone.outputs[request.request_id], Finished), lone.outputs[request.request_id]
            made[workflow.name, rounds, seed] = lone.picture(request)
        lone.core.mailbox.put_nowait(Drain())
        await asyncio.wait_for(running, PATIENCE)
    return made


async def test_two_hundred_requests_on_three_ranks_make_what_they_make_alone(tiny_checkpoint: Path) -> None:
    """Two regions whose counts differ by request, a join, a deferred edge, batches on two and three ranks, ordinary
    edits, aborts: all end once, nothing is left, and every picture is the one that its request makes alone.
    """
    alone, random = await pictures_alone(tiny_checkpoint), Random(2)
    assert len(set(alone.values())) > len(alone) // 2, "requests must differ"
    async with engine(tiny_checkpoint, 3, seed=3) as site:
        running = asyncio.create_task(site.core.run())
        requests = {}
        for index in range(200):
            workflow, rounds, seed = random.choice(kinds())
            request = site.request(str(index), workflow, rounds, seed, previews=random.choice([0, 0, 1]))
            requests[request.request_id] = request, alone[workflow.name, rounds, seed]
            site.core.mailbox.put_nowait(request)
            if random.random() < 0.1:
                site.core.mailbox.put_nowait(Abort(request_ids=(str(random.randrange(index + 1)),)))
            await asyncio.sleep(random.choice([0, 0, 0.01]))
        site.core.mailbox.put_nowait(Drain())
        await asyncio.wait_for(running, PATIENCE)
        assert set(site.outputs) == set(requests)
        for name, output in site.outputs.items():
            request, picture = requests[name]
            assert isinstance(output, Finished | Aborted), output
            if isinstance(output, Finished):
                assert site.picture(request) == picture, f"{request.workflow} {request.rounds}"
        assert sum(isinstance(output, Finished) for output in site.outputs.values()) > 150
        plans = site.recorder.plans
        assert {len(batch.ranks) for plan in plans for batch in plan.batches} == {1, 2, 3}
        assert sum(len(plan.deliveries) for plan in plans) > 50
        assert sum(len(plan.transfers) for plan in plans) > 50
        site.core._scheduler.check_integrity()
        assert site.core._scheduler.values.num_moving == 0

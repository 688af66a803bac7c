"""Injects faults into the real processes of an AsyncEngine: edits to run meanwhile, and checks of what is left
afterwards.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import on_ray
import psutil
import pytest
from engines import serving_engine
from forked_processes import ForkedLauncher
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from core.config import ControlNetConfig, EngineConfig, ModelConfig, SchedulerConfig, StencilConfig
from core.ipc.process import spawn
from core.lora import Lora
from core.sampling_params import SamplingParams
from engine.client import services
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput
from engine.client.processes import worker_launcher as worker_launchers
from engine.client.processes.worker_launcher import WorkerLauncher, worker_launcher
from engine.client.upload import BytesUpload
from engine.router import local_backend

Told = list[tuple[int | None, bytes]]
"""(index of a partial image, or None for the final one; file), in the order of arrival."""


@asynccontextmanager
async def start(
    checkpoint: Path,
    size: int = 1,
    degree: int = 1,
    segmenter: Sequence[Path] = (),
    controlnets: Sequence[ControlNetConfig] = (),
    **settings: float,
) -> AsyncIterator[AsyncEngine]:
    """Starts an AsyncEngine with `size` engines, of which `degree` ranks compute a step together. At the end nothing
    may be left: no process, even if it was adopted by another; so no shared memory, which has no name; no file; no
    allocation in the arena.
    """
    parts = {"segmenter": tuple(map(str, segmenter)), "controlnets": tuple(controlnets)}
    model = ModelConfig(model=str(checkpoint), threads=1, **parts)
    names = ("hang_seconds", "start_seconds", "workers_per_engine", "data_parallel_backend", "ray_address")
    of_engine = {key: settings.pop(key) for key in names if key in settings}
    scheduler = SchedulerConfig(degree=degree)
    config = EngineConfig(models=(model,), scheduler=scheduler, data_parallel_size=size, **of_engine)  # type: ignore[arg-type]
    others = _all()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        try:
            async with serving_engine(StencilConfig(engine=config, **settings)) as engine:  # type: ignore[arg-type]
                yield engine
                async with asyncio.timeout(30):
                    while engine.num_admitted or engine.services.arena.used_bytes:
                        await asyncio.sleep(0.01)
                engine.services.arena.check_integrity()
        finally:
            own = [process for process in psutil.process_iter() if folder_of(process) == folder]
            _, left = psutil.wait_procs([*own, *_all().difference(others)], timeout=10)
        assert not left
        assert not os.listdir(folder)


def _all() -> set[psutil.Process]:
    """Processes of all kinds. Those that launchers of the tests have forked show the launchers' environment."""
    return set(processes(""))


def folder_of(process: psutil.Process) -> str | None:
    """The temporary folder that a process was spawned with, which identifies its test even after the parent is gone."""
    with suppress(psutil.Error):
        return process.environ().get("TMPDIR") if process.pid != os.getpid() else None
    return None


def processes(kind: str) -> list[psutil.Process]:
    """Processes of this one's own engines, not of a server that other tests share, that run as "stencil-`kind`-N"; N
    ascending, and of one N those that started first, whose ids need not be lower. kind: "" for all.
    """
    found, of_servers = {}, set[int]()
    there = [each for engine in on_ray.engines() for each in (engine, *engine.children(recursive=True))]
    for process in [*psutil.Process().children(recursive=True), *there]:  # each after its parent
        with suppress(psutil.NoSuchProcess):
            if process.ppid() in of_servers or "entrypoints.serve" in process.cmdline():
                of_servers.add(process.pid)
            else:
                found[process] = _name(process, kind)
    named = [process for process, name in found.items() if name]
    return sorted(named, key=lambda process: (found[process], process.create_time()))


def _name(process: psutil.Process, kind: str) -> str:
    """The process's name "stencil-`kind`" or "stencil-`kind`-N"; empty if it is of another kind, or gone."""
    with suppress(psutil.NoSuchProcess):
        return next((word for word in process.cmdline() if word.startswith(f"stencil-{kind}")), "")
    return ""


async def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Asks the sooner again the less an answer takes: to read all metrics, or all processes, takes milliseconds."""
    async with asyncio.timeout(seconds):
        while True:
            began = time.thread_time()
            if condition():
                return
            await asyncio.sleep(max(0.005, 5 * (time.thread_time() - began)))


def count(engine: AsyncEngine, name: str) -> float:
    """The sum of a metric's series."""
    families = text_string_to_metric_families(engine.metrics.exposition().decode())
    family = next(family for family in families if family.name == f"stencil:{name}")
    return sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))


# ------------------------------------------------------------------------------------------------------------- edits


def file_of(pixels: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")  # type: ignore[arg-type]
    return file.getvalue()


def make_input(
    seed: int = 0,
    steps: int = 30,
    prompt: str = "a red shirt",
    partial_images: int = 0,
    side: int = 96,
    own_page_steps: tuple[int, ...] | None = None,
) -> EditInput:
    """An edit of the middle third of a random picture, determined by `seed`."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    mask = np.zeros((side, side), np.uint8)
    mask[side // 3 : 2 * side // 3, side // 3 : 2 * side // 3] = 255
    return EditInput(
        prompt=prompt,
        image=BytesUpload(file_of(pixels)),
        mask=BytesUpload(file_of(mask)),
        mask_kind="luminance",
        sampling=SamplingParams(num_inference_steps=steps, seed=7 + seed, own_page_steps=own_page_steps),
        partial_images=partial_images,
    )


EDITS = {f"r{seed}": make_input(seed, steps=60 + 10 * seed, partial_images=seed) for seed in range(3)}
EDITS["r3"] = make_input(3, steps=90, partial_images=3, own_page_steps=(0, 20, 45))
BRIEF = {f"r{seed}": make_input(seed, steps=20 + 5 * seed) for seed in range(4)}


async def run(engine: AsyncEngine, request_id: str, edit: EditInput, loras: Sequence[Lora] = ()) -> Told:
    async with engine.edit(request_id, edit, engine.choose_model(loras=loras)) as outputs:
        return [(output.partial_index, bytes(output.data)) async for output in outputs]


async def run_each(engine: AsyncEngine, edits: dict[str, EditInput]) -> dict[str, Told]:
    """Run the edits one after the other, undisturbed."""
    return {name: await run(engine, name, edit) for name, edit in edits.items()}


async def begin(engine: AsyncEngine, edits: dict[str, EditInput]) -> dict[str, asyncio.Task[Told]]:
    """Start all edits; returns once as many run or have ended as there are workers, or all: one may have to wait for
    another where steps gain nothing by being shared, and on a busy machine one may end before the next begins.
    """
    tasks = {name: asyncio.create_task(run(engine, name, edit)) for name, edit in edits.items()}
    number = min(len(edits), len(processes("worker")))
    await until(lambda: engine.num_requests_running + sum(task.done() for task in tasks.values()) >= number)
    return tasks


async def ends(tasks: dict[str, asyncio.Task[Told]], seconds: float = 180) -> dict[str, Told]:
    return {name: await asyncio.wait_for(task, seconds) for name, task in tasks.items()}


def finals(told: dict[str, Told]) -> dict[str, bytes]:
    return {name: outputs[-1][1] for name, outputs in told.items()}


def assert_alike(ours: dict[str, Told], theirs: dict[str, Told]) -> None:
    """Assert that partial images come in the same order and final pictures are equal, up to rounding, which depends on
    the batch.
    """
    assert set(ours) == set(theirs)
    for name in ours:
        assert [index for index, _ in ours[name]] == [index for index, _ in theirs[name]], "all are told, once"
        a, b = (np.asarray(Image.open(io.BytesIO(told[name][-1][1]))).astype(int) for told in (ours, theirs))
        difference = np.abs(a - b)
        assert difference.max() <= 1, name
        assert (difference > 0).mean() <= 0.001, name


# ------------------------------------------------------------------------------------------------------------ faults

POISON = "poison"
"""The prompt that triggers a fault."""

_SHIM = """
import os, sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in INJECTED:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            INJECTED[name](module, os.path.dirname(__file__))

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


_PROVEN = """
def prove(module, folder):
    module.PROVEN_SECONDS = {}

INJECTED["engine.engine_core.engine_core"] = prove
"""
"""After how long an engine starts a worker again at once."""


def shim(
    folder: Path, patch: pytest.MonkeyPatch, inject: str = "inject = None", *, proven_seconds: float = 0.0
) -> None:
    """Make every process that is started from now on and imports the runner call `inject(runner module, folder)`, whose
    source is given here. Simulates a bug in a library, lack of memory and the like. proven_seconds: see
    `engine_core.PROVEN_SECONDS`; 0: each death of a worker counts as the first.
    """
    hooks = 'INJECTED = {"model_executor.worker.runner": inject} if inject else {}\n'
    (folder / "sitecustomize.py").write_text(inject + "\n" + hooks + _PROVEN.format(proven_seconds) + _SHIM)
    on_ray.inject(folder)
    patch.setenv("PYTHONPATH", str(folder))
    patch.setattr(local_backend, "spawn", spawn)  # a forked engine has imported everything
    with worker_launcher.used() as launcher:
        patch.setattr(worker_launchers, "spawn", partial(ForkedLauncher, launcher))
    patch.setattr(worker_launchers, "MAIN", "faulty_launcher:serve")
    patch.setattr(services, "worker_launcher", WorkerLauncher())  # the one of all tests has no faults


class Fault:
    """Controls the fault that a worker with `FAULTS` in it simulates, from `set` until `clear`."""

    def __init__(self, folder: Path) -> None:
        self._file, self._log = folder / "fault.json", folder / "faults.log"

    def set(self, **what: object) -> None:
        self.clear()
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps(what))
        draft.rename(self._file)

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)
        self._log.unlink(missing_ok=True)

    @property
    def count(self) -> int:
        """How often the fault occurred since it was set."""
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0

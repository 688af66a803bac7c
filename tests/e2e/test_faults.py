"""Engines and workers that die or hang under load: every request ends once, with the picture of an undisturbed run."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from checkpoints import make_flux_fill
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from core.config import EngineConfig, ModelConfig, StencilConfig
from core.errors import DeadlineExceededError, EngineDeadError
from core.request import SamplingParams
from engine import engine_replica
from engine.async_engine import AsyncEngine
from engine.edit import EditInput
from engine.upload import BytesUpload

POISON = "poison"
SHIM = f"""
import os, signal, sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "model_executor.runner":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            poison(module.Runner)

        spec.loader.exec_module = exec_module
        return spec

def poison(runner):
    run = runner.run

    def poisoned(self, batch):
        if any(getattr(item.work, "prompt", "") == {POISON!r} for item in batch.items):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, batch)

    runner.run = poisoned

sys.meta_path.insert(0, Finder())
"""
"""A sitecustomize module: a worker that is to encode this prompt dies, as of a bug in a library."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux_fill(tmp_path_factory.mktemp("model") / "flux", generation_config={"num_inference_steps": 4})


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of all processes; nothing may be left in it."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@asynccontextmanager
async def start(checkpoint: Path, size: int = 1, **settings: float) -> AsyncIterator[AsyncEngine]:
    """At the end nothing may be left: no process, no shared memory in use, no file."""
    model = ModelConfig(model=str(checkpoint), threads=1)
    hang_seconds = settings.pop("hang_seconds", 10.0)
    config = EngineConfig(models=(model,), data_parallel_size=size, hang_seconds=hang_seconds)
    before = set(psutil.Process().children(recursive=True))
    engine = AsyncEngine(StencilConfig(engine=config, **settings))  # type: ignore[arg-type]
    await engine.start()
    try:
        await engine.ready()
        yield engine
        async with asyncio.timeout(10):
            while engine.num_admitted:
                await asyncio.sleep(0.01)
        assert engine.allocator.used_bytes == 0
        engine.allocator.check_integrity()
    finally:
        await engine.shutdown(drain_seconds=5)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not os.listdir(tempfile.gettempdir())


def file_of(pixels: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")  # type: ignore[arg-type]
    return file.getvalue()


def make_input(seed: int = 0, steps: int = 30, prompt: str = "a red shirt", partial_images: int = 0) -> EditInput:
    """An edit of the middle of a random picture of 96 x 96 pixels, which `seed` makes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (96, 96, 3), np.uint8)
    mask = np.zeros((96, 96), np.uint8)
    mask[32:64, 32:64] = 255
    return EditInput(
        prompt=prompt,
        image=BytesUpload(file_of(pixels)),
        mask=BytesUpload(file_of(mask)),
        mask_kind="luminance",
        sampling=SamplingParams(num_inference_steps=steps, seed=7 + seed),
        partial_images=partial_images,
    )


Told = list[tuple[int | None, bytes]]


async def run(engine: AsyncEngine, request_id: str, edit: EditInput) -> Told:
    """(index of a partial image or None, file) in the order they came."""
    async with engine.edit(request_id, edit) as outputs:
        return [(output.partial_index, bytes(output.data)) async for output in outputs]


def processes(kind: str) -> list[psutil.Process]:
    """Processes of this one's own engines, not of a server that other tests share, that run as "stencil-`kind`-N"; N
    ascending.
    """
    found = {}
    engines = [child for child in psutil.Process().children() if "entrypoints.serve" not in child.cmdline()]
    for child in [*engines, *(worker for engine in engines for worker in engine.children())]:
        for word in child.cmdline():
            if word.startswith(f"stencil-{kind}-"):
                found[child.pid] = (word, child)
    return [child for _, child in sorted(found.values(), key=lambda pair: pair[0])]


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def count(engine: AsyncEngine, name: str) -> float:
    """A metric's value, its series added up."""
    families = text_string_to_metric_families(engine.metrics.exposition().decode())
    family = next(family for family in families if family.name == f"stencil:{name}")
    return sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))


EDITS = {f"r{seed}": make_input(seed, steps=60 + 10 * seed, partial_images=seed) for seed in range(4)}


async def run_all(engine: AsyncEngine) -> dict[str, asyncio.Task[Told]]:
    """All of EDITS, every one of them begun, and partial images told of one."""
    tasks = {name: asyncio.create_task(run(engine, name, edit)) for name, edit in EDITS.items()}
    await until(lambda: engine.num_requests_running == len(EDITS))
    return tasks


def finals(told: dict[str, Told]) -> dict[str, bytes]:
    return {name: outputs[-1][1] for name, outputs in told.items()}


@pytest.mark.parametrize("size", [1, 2])
async def test_after_a_death_every_request_ends_with_the_picture_of_an_undisturbed_run(
    checkpoint: Path, size: int
) -> None:
    async with start(checkpoint, size) as engine:
        expected = {name: await run(engine, name, edit) for name, edit in EDITS.items()}
        for kind in ("worker", "engine"):
            tasks = await run_all(engine)
            await asyncio.sleep(0.1)
            processes(kind)[0].kill()
            await until(lambda: sum(engine.alive) == size - 1)
            assert engine.is_ready == (size == 2)
            told = {name: await asyncio.wait_for(task, 60) for name, task in tasks.items()}
            for name, outputs in told.items():
                indices = [index for index, _ in outputs]
                assert indices == [index for index, _ in expected[name]], "partial images are told once"
            assert_alike(finals(told), finals(expected))
            await until(lambda: all(engine.alive))
        assert await run(engine, "later", EDITS["r0"]) == expected["r0"], "the new engine paints the same"
        assert count(engine, "engine_restarts") == 2
        assert 2 <= count(engine, "request_retries") <= 2 * len(EDITS)
        assert count(engine, "request_success") == 3 * len(EDITS) + 1


def assert_alike(ours: dict[str, bytes], theirs: dict[str, bytes]) -> None:
    """The same bytes; in company of others a value may be rounded the other way."""
    assert set(ours) == set(theirs)
    for name in ours:
        a, b = (np.asarray(Image.open(io.BytesIO(pictures[name]))).astype(int) for pictures in (ours, theirs))
        difference = np.abs(a - b)
        assert difference.max() <= 1, name
        assert (difference > 0).mean() <= 0.001, name


async def test_a_worker_that_dies_or_hangs_between_partial_images_changes_no_byte_and_repeats_none(
    checkpoint: Path,
) -> None:
    edit = make_input(steps=100, partial_images=3)
    async with start(checkpoint, hang_seconds=2.0) as engine:
        expected = await run(engine, "undisturbed", edit)
        assert [index for index, _ in expected] == [0, 1, 2, None]
        for number, fault in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            told: Told = []
            async with asyncio.timeout(60), engine.edit(f"disturbed-{number}", edit) as outputs:
                async for output in outputs:
                    told.append((output.partial_index, bytes(output.data)))
                    if len(told) == 1:
                        processes("worker")[0].send_signal(fault)
            assert told == expected
            assert count(engine, "request_retries") == number


async def test_a_request_that_kills_workers_ends_and_takes_no_other_along(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHIM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with start(checkpoint) as engine:
        tasks = await run_all(engine)
        with pytest.raises(EngineDeadError, match=r"3 engines died while running this request.*SIGKILL"):
            await asyncio.wait_for(run(engine, "poison", make_input(prompt=POISON)), 120)
        for task in tasks.values():
            assert (await asyncio.wait_for(task, 60))[-1][0] is None
        await until(lambda: engine.is_ready)
        assert count(engine, "engine_restarts") == 3


async def test_waiting_for_an_engine_deadlines_hold_and_aborts_are_answered_at_once(checkpoint: Path) -> None:
    async with start(checkpoint) as engine:
        edit = make_input(steps=200)
        hasty = replace(edit, sampling=SamplingParams(num_inference_steps=200, timeout=1.0))
        due = asyncio.create_task(run(engine, "due", hasty))
        given_up = asyncio.create_task(run(engine, "given up", edit))
        await until(lambda: engine.num_requests_running == 2)
        processes("engine")[0].kill()
        await until(lambda: engine.num_requests_waiting == 2)
        assert not engine.is_ready
        given_up.cancel()
        await until(lambda: engine.num_requests_waiting == 1, 0.5)
        with pytest.raises(DeadlineExceededError):
            await asyncio.wait_for(due, 2)
        await until(lambda: engine.num_requests_waiting == 0, 0.5)
        await until(lambda: engine.is_ready)
        assert engine.num_requests_running == 0


async def test_an_engine_that_keeps_dying_is_given_up_and_the_last_one_ends_all(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_replica, "MAX_RESTARTS", 1)
    async with start(checkpoint, max_retries=5) as engine:
        task = asyncio.create_task(run(engine, "r", make_input(steps=200)))
        failed = asyncio.create_task(engine.failed())
        for _ in range(2):
            await until(lambda: engine.num_requests_running == 1)
            assert not failed.done()
            processes("engine")[0].kill()
            await until(lambda: not engine.is_ready)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(task, 10)
        assert "SIGKILL" in str(await asyncio.wait_for(failed, 10))
        with pytest.raises(EngineDeadError):
            await run(engine, "too late", make_input())


async def test_shutdown_while_an_engine_is_started_anew(checkpoint: Path) -> None:
    started = time.monotonic()
    async with start(checkpoint) as engine:
        task = asyncio.create_task(run(engine, "r", make_input(steps=200)))
        await until(lambda: engine.num_requests_running == 1)
        processes("engine")[0].kill()
        await until(lambda: not engine.is_ready)
        started = time.monotonic()
        await engine.shutdown(drain_seconds=0.0)
        with pytest.raises(Exception, match="shut down"):
            await task
        assert time.monotonic() - started < 5

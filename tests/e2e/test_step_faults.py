"""Work that fails while its worker lives: only the failing request fails, and the others' pictures are unchanged.

All tests share one engine. No process is killed here, not even for being slow, since the machine may be slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from fault_kit import (
    BRIEF,
    POISON,
    Fault,
    Told,
    assert_alike,
    begin,
    count,
    ends,
    make_input,
    processes,
    run,
    run_each,
    shim,
    start,
    until,
)

from core.errors import EngineError, OutOfMemoryError
from engine.client.async_engine import AsyncEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAULTS = f"""
import json
import sys

def inject(module, folder):
    import torch
    from model_executor.models.transformer import blocks

    kinds = {{"OutOfMemoryError": torch.OutOfMemoryError, "MemoryError": MemoryError, "RuntimeError": RuntimeError}}

    def look():
        try:
            with open(folder + "/fault.json") as file:
                return json.load(file)
        except FileNotFoundError:
            return {{}}

    def count():
        with open(folder + "/faults.log", "a+") as log:
            log.seek(0)
            return len(log.readlines())

    def fail(now):
        with open(folder + "/faults.log", "a") as log:
            log.write("x\\n")
        raise kinds[now["kind"]]("injected")

    def is_due(now, stage, request_ids):
        if now.get("stage") != stage or count() >= now.get("times", 1 << 60):
            return False
        return not now.get("only_poison", True) or any(name.startswith({POISON!r}) for name in request_ids)

    def wrap(op):
        original = module.HANDLERS[op]

        def wrapped(context, items):
            results, now = original(context, items), look()  # it fails when all is done
            if is_due(now, op, [item.request_id for item in items]):
                fail(now)
            return results

        module.HANDLERS[op] = wrapped

    for op in ("text_encode", "image_encode", "decode"):
        wrap(op)
    step = sys.modules["model_executor.worker.ops.denoise"]._Step
    denoise, outputs = module.HANDLERS["denoise"], step.outputs

    def denoise_or_fail(context, items):
        now, left = look(), len(items)

        def outputs_or_fail(*args):
            nonlocal left
            left -= 1
            if not left and is_due(now, "denoise", [item.request_id for item in items]):
                fail(now)
            return outputs(*args)

        step.outputs = outputs_or_fail
        return denoise(context, items)

    module.HANDLERS["denoise"] = denoise_or_fail
    run = blocks.SingleBlock.run

    def run_or_fail(self, stream, number):
        now = look()
        if len(stream.hidden) > now.get("tokens", 1 << 60):
            fail(now)
        return run(self, stream, number)

    blocks.SingleBlock.run = run_or_fail
"""
"""Faults half-way: in a block that has too many tokens, or when all but the last of a batch has been computed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where workers look for the faults to simulate."""
    return tmp_path_factory.mktemp("faults")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_checkpoint: Path, folder: Path) -> AsyncIterator[AsyncEngine]:
    with pytest.MonkeyPatch.context() as patch:
        shim(folder, patch, FAULTS)
        async with start(tiny_checkpoint, hang_seconds=60.0) as engine:
            (worker,) = processes("worker")
            yield engine
            assert processes("worker") == [worker], "which lived"
            assert count(engine, "engine_restarts") == count(engine, "request_retries") == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(engine: AsyncEngine) -> dict[str, Told]:
    return await run_each(engine, BRIEF)


@pytest.fixture
def fault(folder: Path) -> Iterator[Fault]:
    fault = Fault(folder)
    yield fault
    fault.clear()


async def test_a_step_that_does_not_fit_in_memory_is_done_in_parts_with_equal_results(
    engine: AsyncEngine, expected: dict[str, Told], fault: Fault
) -> None:
    done = count(engine, "request_success")
    fault.set(kind="OutOfMemoryError", tokens=70)
    assert_alike(await ends(await begin(engine, BRIEF)), expected)
    assert fault.count, "it came about"
    assert count(engine, "request_success") == done + len(BRIEF)


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("denoise", "RuntimeError"),
        ("denoise", "OutOfMemoryError"),
        ("text_encode", "RuntimeError"),
        ("image_encode", "OutOfMemoryError"),
        ("decode", "MemoryError"),
    ],
)
async def test_a_request_that_fails_alone_fails_without_failing_others(
    engine: AsyncEngine, expected: dict[str, Told], fault: Fault, stage: str, kind: str
) -> None:
    done = count(engine, "request_success")
    fault.set(stage=stage, kind=kind)
    tasks = await begin(engine, BRIEF)
    poison = asyncio.create_task(run(engine, f"{POISON}-{stage}", make_input(steps=20)))
    if kind == "RuntimeError":
        with pytest.raises(EngineError, match="RuntimeError: injected"):
            await poison
    else:
        with pytest.raises(OutOfMemoryError, match="send a smaller one"):
            await poison
    assert_alike(await ends(tasks), expected)
    assert fault.count >= 1
    assert count(engine, "request_success") == done + len(BRIEF) + 1


async def test_a_step_that_fits_at_the_second_attempt_succeeds(
    engine: AsyncEngine, expected: dict[str, Told], fault: Fault
) -> None:
    for stage in ("text_encode", "image_encode", "denoise", "decode"):
        fault.set(stage=stage, kind="OutOfMemoryError", only_poison=False, times=1)
        assert_alike(await ends(await begin(engine, BRIEF)), expected)
        assert fault.count == 1


async def test_a_template_that_cannot_be_primed_fails_its_own_edits(
    engine: AsyncEngine, expected: dict[str, Told], fault: Fault
) -> None:
    fault.set(kind="OutOfMemoryError", tokens=40)
    tasks = await begin(engine, BRIEF)
    with pytest.raises(OutOfMemoryError, match="send a smaller one"):
        await run(engine, "cold", make_input(seed=9))
    assert_alike(await ends(tasks), expected)
    fault.clear()
    await run(engine, "cold again", make_input(seed=9))
    await until(lambda: engine.num_requests_running == 0)

"""Requests that begin while their adapter is loading: real engines, faults, and a load that takes as long as a test
says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from adapters import make_lora
from fault_kit import make_input, processes, start, until

from core.config import ModelConfig
from core.errors import DeadlineExceededError, InvalidRequestError
from core.late_adapters import LateAdapters
from core.lora import Lora
from core.messages.engine import AdapterAdded, EngineRequest
from core.sampling_params import SamplingParams
from engine.client.async_engine import AsyncEngine
from engine.client.edit_types import EditInput, EditReport
from entrypoints.image_engine import Edit, ImageEngine
from tools.random_checkpoints import make_sd3

on_site = pytest.mark.asyncio(loop_scope="module")

MOST = 5
STEPS = 40


def exact(steps: int = STEPS, **sampling: Any) -> EditInput:
    edit = make_input(steps=steps)
    return replace(edit, sampling=msgspec.structs.replace(edit.sampling, mask_aware=False, **sampling))


@dataclass
class Site:
    """An engine whose loads wait for the gate."""

    engine: AsyncEngine
    files: dict[str, Path]
    gate: asyncio.Event

    def begin(self, file: str = "hat") -> None:
        self.gate.clear()
        self.engine.begin_adapter("hat", str(self.files[file]))

    async def run(
        self, name: str, edit: EditInput, *, most: int = 0, loras: tuple[str, ...] = ("hat",)
    ) -> tuple[bytes, EditReport]:
        choice = self.engine.choose_model(loras=[Lora(each) for each in loras], steps_without_lora=most)
        async with self.engine.edit(name, edit, choice) as outputs:
            ((data, report),) = [(bytes(output.data), output.report) async for output in outputs]
        assert report is not None
        return data, report

    async def late(self, name: str, edit: EditInput | None = None) -> asyncio.Task[tuple[bytes, EditReport]]:
        """A request that has made all steps that it makes without the adapter, and waits for it."""
        self.begin()
        edit = edit or exact()
        task = asyncio.create_task(self.run(name, edit, most=MOST))
        left = (edit.sampling.num_inference_steps or 0) - MOST
        await until(lambda: self.steps_left(name) == left, 20)
        return task

    async def use(self, name: str) -> None:
        """Load it, until the engine has told that the request uses it."""
        self.gate.set()
        known = LateAdapters(most=MOST, least=MOST, are_loaded=True)
        await until(lambda: self.message(name).spec.late == known, 20)

    def message(self, name: str) -> EngineRequest:
        """What is sent if the engine dies."""
        message = self.engine.services.router._placements[f"{name}-0"].message
        assert isinstance(message, EngineRequest)
        return message

    def steps_left(self, name: str) -> int | None:
        """Of a request, as its engine has reported."""
        (load,) = self.engine.loads
        of_request = None if load is None else load.running.get(f"{name}-0")
        return None if of_request is None else of_request.steps_left


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("model")
    checkpoint = make_sd3(folder / "sd3")
    hat, bad = make_lora(folder / "hat.safetensors", checkpoint), folder / "bad.safetensors"
    bad.write_bytes(b"\x00" * 100)
    return {"checkpoint": checkpoint, "hat": hat, "bad": bad}


def load_after(engine: AsyncEngine, wait: Callable[[], Awaitable[object]]) -> None:
    """Let all loads begin only after a wait."""
    additions = engine.services.engines.additions
    load = additions.load_adapter

    async def slowly(*asked: Any) -> AdapterAdded:
        await wait()
        return await load(*asked)

    additions.load_adapter = slowly  # type: ignore[method-assign]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(files: dict[str, Path]) -> AsyncIterator[Site]:
    async with start(files["checkpoint"]) as engine:
        gate = asyncio.Event()
        load_after(engine, gate.wait)
        yield Site(engine, files, gate)


@on_site
async def test_pages_are_with_the_adapter_or_without(site: Site) -> None:
    """Edits under a mask read pages; one whose first steps have no adapter computes every token instead."""
    edit = make_input(steps=12)
    plain, _ = await site.run("plain", edit, loras=())
    task = await site.late("late", edit)
    site.gate.set()
    late, report = await task
    assert (report.exact_reason, report.cache, report.steps_without_lora) == ("late_adapters", "off", MOST)
    hatted, report = await site.run("hatted", edit)
    assert (report.exact_reason, report.cache, report.steps_without_lora) == (None, "miss", None)
    assert (await site.run("again", edit))[0] == hatted
    again, report = await site.run("plain again", edit, loras=())
    assert (again, report.cache) == (plain, "hit")
    assert len({plain, late, hatted}) == 3
    site.engine.unload_adapter("hat")
    task = await site.late("exact", exact(steps=12))
    site.gate.set()
    exactly, report = await task
    assert exactly == late
    template = report.template_id
    assert template is not None
    await until(lambda: site.engine.templates.get(template, "").primed, 20)
    result = replace(make_input(), image=None, template_id=template)
    assert (await site.run("of the result", result))[1].cache == "hit", "it is primed with the adapter"
    site.engine.unload_adapter("hat")


@on_site
async def test_an_adapter_that_does_not_come(site: Site) -> None:
    """What waits for it fails with the reason, in its time."""
    task = await site.late("unloaded", exact(8))
    site.engine.unload_adapter("hat")
    with pytest.raises(InvalidRequestError, match="'hat' was not loaded: it was unloaded") as caught:
        await task
    assert (caught.value.param, caught.value.code) == ("lora", "adapter_not_loaded")
    site.gate.set()

    site.begin("bad")
    task = asyncio.create_task(site.run("bad", exact(8), most=MOST))
    await asyncio.sleep(0)
    site.gate.set()
    with pytest.raises(InvalidRequestError, match="'hat' was not loaded"):
        await task
    with pytest.raises(InvalidRequestError, match="served without adapters"):
        await site.run("gone", exact(8), most=MOST)

    site.begin()
    with pytest.raises(DeadlineExceededError):
        await site.run("timeout", exact(8, timeout=0.5), most=MOST)
    task = asyncio.create_task(site.run("aborted", exact(8), most=MOST))
    await until(lambda: site.engine.num_requests_running > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "hat" not in site.engine.models
    await until(lambda: not any("_use_adapters" in repr(task) for task in asyncio.all_tasks()), 20)
    site.engine.unload_adapter("hat")


@on_site
async def test_one_that_is_loaded_before_anything_begins_is_like_any_other(site: Site) -> None:
    site.begin()
    choice = site.engine.choose_model(loras=[Lora("hat")], steps_without_lora=MOST)
    site.gate.set()
    await until(lambda: "hat" in site.engine.models)
    async with site.engine.edit("late", exact(8), choice) as outputs:
        ((late, report),) = [(bytes(output.data), output.report) async for output in outputs]
    assert report is not None
    assert report.steps_without_lora in range(MOST + 1), "above 0: it had begun when the engine heard of it"
    whole, _ = await site.run("whole", exact(8))
    assert (late == whole) is (report.steps_without_lora == 0)
    site.engine.unload_adapter("hat")


@on_site
async def test_what_began_without_is_repeated_after_deaths(site: Site) -> None:
    """Of the worker, and of the engine: the same steps have no adapter, so that the picture is the same."""
    plain, report = await site.run("plain", exact(), loras=())
    assert report.steps_without_lora is None
    task = await site.late("undisturbed")
    with pytest.raises(InvalidRequestError, match="'hat' is still loading") as caught:
        site.engine.choose_model(loras=[Lora("hat")])
    assert (caught.value.param, caught.value.code) == ("lora", "adapter_loading")
    assert not task.done()
    site.gate.set()
    picture, report = await task
    assert report.steps_without_lora == MOST
    whole, _ = await site.run("whole", exact())
    assert len({plain, picture, whole}) == 3
    for kind, is_used in (("worker", True), ("engine", True), ("engine", False)):
        site.engine.unload_adapter("hat")
        name = f"{kind} {is_used}"
        task = await site.late(name)
        if is_used:
            await site.use(name)
        (process,) = processes(kind)
        assert not task.done(), "it is disturbed too late"
        process.kill()
        if not is_used:
            await until(lambda: not any(site.engine.alive))
            site.gate.set()
        again, report = await task
        assert (again == picture) is (report.steps_without_lora == MOST)
        assert not is_used or report.steps_without_lora == MOST, "an engine that had told nothing may begin otherwise"
        await until(lambda: all(site.engine.alive))


WORKFLOW = """
from entrypoints.workflows import Workflow, steps
from entrypoints.workflows.families import VAE, Denoiser, LatentsGenerator, LoRA, TextEncoder, denoise
from entrypoints.workflows.optimizations import AsynchronousAdapters

workflow = Workflow(name="hatted")
denoiser = Denoiser()
denoiser.add_patch(LoRA("hat", 0.8))
latents = LatentsGenerator()(workflow.add_input("seed", int))
prompt_embeds = TextEncoder()(workflow.add_input("prompt", str))
for _ in steps(workflow.add_input("num_inference_steps", int)):
    latents = denoise(denoiser(latents, prompt_embeds), latents)
workflow.add_output(VAE()(latents, mode="decode"), name="picture")
workflow.optimize(AsynchronousAdapters(steps=2))
"""


def test_a_workflow_may_have_its_requests_begin_without(files: dict[str, Path], tmp_path: Path) -> None:
    """Offline, with the adapter of its denoiser."""
    (tmp_path / "hatted.py").write_text(WORKFLOW)
    model = ModelConfig(model=str(files["checkpoint"]), served_model_name="tiny", workflow="hatted", threads=1)
    asked = [Edit(prompt="a red hat")], SamplingParams(num_inference_steps=6, seed=1)
    with ImageEngine(models=[model], workflows=[tmp_path]) as engine:
        load_after(engine._engine, partial(asyncio.sleep, 0.5))
        assert engine.load_adapter("hat", files["hat"], wait=False).parent == "tiny"
        (late,) = engine.generate(*asked)
        (whole,) = engine.generate(*asked)
        assert (late.error, whole.error) == (None, None)
        assert late.reports[0].steps_without_lora in (1, 2)
        assert whole.reports[0].steps_without_lora is None
        assert late.images[0].tobytes() != whole.images[0].tobytes()
        with pytest.raises(InvalidRequestError, match="'hat' is served already"):
            engine.load_adapter("hat", files["hat"])

"""Which adapters are served and kept while names and requests come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import pytest_asyncio
from fakes import MODEL

from core.config import EngineConfig
from core.errors import (
    AdapterNotFoundError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    StencilError,
)
from core.graph.workflows.inpaint import INPAINT
from core.lora import Lora
from core.messages.engine import AdapterAdded
from core.messages.worker import DropAdapter
from core.model_choice import ModelChoice, choose_model
from core.patches import Patch
from core.sampler_defaults import SamplerDefaults
from engine.client.resolve.served_models import ServedModels
from engine.client.sessions import runtime_adapters
from engine.client.sessions.running_sessions import RunningSessions
from engine.client.sessions.runtime_adapters import RuntimeAdapters
from engine.client.sessions.session import Session
from engine.observability.metrics import Metrics


class Engines:
    """The patch of a file is its path; loading waits for the gate."""

    def __init__(self) -> None:
        self.resident: list[str] = []
        self.keep: set[str] = set()  # of the last load
        self.failing: list[StencilError] = []  # the next loads, from the last on
        self.gate = asyncio.Event()
        self.gate.set()

    async def load_adapter(self, model: str, name: str, path: str, keep: Collection[str]) -> AdapterAdded:
        await self.gate.wait()
        self.keep = set(keep)
        if self.failing:
            raise self.failing.pop()
        if path == "bad":
            raise InvalidRequestError("Invalid 'lora_path': bad.", param="lora_path")
        self.resident = [*(patch for patch in self.resident if patch != path), path]
        return AdapterAdded("load", path, SamplerDefaults(num_inference_steps=4))

    def remove(self, adapter: DropAdapter) -> None:
        self.resident.remove(adapter.patch)


class Request(Session):
    """Runs until told to end."""

    def give_up(self) -> None:
        self.done.set()

    async def close(self) -> None:
        await self.done.wait()


class Server:
    def __init__(self) -> None:
        config = EngineConfig()
        self.served, self.sessions, self.engines = ServedModels(config), RunningSessions(), Engines()
        self.served.set({"m": MODEL}, config)
        self.metrics = Metrics()
        engines = SimpleNamespace(additions=self.engines)
        services = SimpleNamespace(served=self.served, sessions=self.sessions, engines=engines, metrics=self.metrics)
        self.adapters = RuntimeAdapters(services, asyncio.Lock())  # type: ignore[arg-type]

    def begin(self, *names: str) -> Request:
        choice = choose_model(self.served.by_name, "", [Lora(name) for name in names])
        return Request(choice, "", 1)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    async with asyncio.TaskGroup() as tasks:
        server.sessions.start(tasks)
        yield server


async def test_a_loaded_adapter_is_served_under_its_name(server: Server) -> None:
    info = await server.adapters.load("hat", "h")
    assert (info.name, info.parent, info.patch) == ("hat", "m", "h")
    assert info.defaults.num_inference_steps == 4
    assert choose_model(server.served.by_name, "", [Lora("hat", 0.5)]).patches == (Patch("h", 0.5),)
    assert b'running_lora_adapters="hat"' in server.metrics.exposition()
    server.adapters.unload("hat")
    assert list(server.served.by_name) == ["m"]
    assert b'running_lora_adapters=""' in server.metrics.exposition()


async def test_it_is_kept_until_the_last_request_with_it_has_ended(server: Server) -> None:
    await server.adapters.load("hat", "h")
    await server.adapters.load("shirt", "s")
    with server.sessions.track(server.begin("hat", "shirt")):
        with server.sessions.track(server.begin("hat")):
            server.adapters.unload("hat")
            await settle()
            assert server.engines.resident == ["h", "s"]
        await settle()
        assert server.engines.resident == ["h", "s"]
    await settle()
    assert server.engines.resident == ["s"]


async def test_another_name_keeps_it(server: Server) -> None:
    """Also one that is given after the first was taken away."""
    await server.adapters.load("hat", "h")
    await server.adapters.load("cap", "h")
    assert server.engines.keep == {"h"}
    server.adapters.unload("hat")
    await settle()
    assert server.engines.resident == ["h"]
    with server.sessions.track(server.begin("cap")):
        server.adapters.unload("cap")
        await server.adapters.load("hood", "h")
    await settle()
    assert server.engines.resident == ["h"]
    server.adapters.unload("hood")
    await settle()
    assert server.engines.resident == []


async def test_a_name_given_while_it_is_dropped_keeps_it(server: Server) -> None:
    await server.adapters.load("hat", "h")
    server.engines.gate.clear()
    loading = asyncio.create_task(server.adapters.load("cap", "h"))
    await settle()
    server.adapters.unload("hat")
    await settle()
    server.engines.gate.set()
    await loading
    await settle()
    assert server.engines.resident == ["h"]


async def test_a_shutdown_ends_a_load_and_those_that_wait_for_it(server: Server) -> None:
    server.engines.gate.clear()
    loads = [asyncio.create_task(server.adapters.load(name, name)) for name in ("hat", "cap")]
    await settle()
    await server.sessions.drain(0.0)
    results = await asyncio.gather(*loads, server.adapters.load("hood", "h"), return_exceptions=True)
    assert [type(result) for result in results] == [OverloadedError] * 3


async def test_a_shutdown_does_not_wait_for_the_readers_of_one_that_was_unloaded() -> None:
    server, is_read = Server(), asyncio.Event()

    async def read() -> None:
        with server.sessions.track(server.begin("hat")):
            await is_read.wait()

    async with asyncio.TaskGroup() as callers:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            server.sessions.start(tasks)
            await server.adapters.load("hat", "h")
            callers.create_task(read())
            await settle()
            server.adapters.unload("hat")
            await settle()
            await server.sessions.drain(0.0)
        is_read.set()
    assert server.engines.resident == ["h"], "the engines end with it"


async def test_a_refused_file_changes_nothing(server: Server) -> None:
    with pytest.raises(InvalidRequestError, match="bad"):
        await server.adapters.load("hat", "bad")
    assert list(server.served.by_name) == ["m"]
    await server.adapters.load("hat", "h")


async def test_there_are_not_more_than_may_be(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_adapters, "MAX_ADAPTERS", 2)
    for name in ("hat", "cap"):
        await server.adapters.load(name, "h")
    with pytest.raises(InvalidRequestError, match="2 adapters are served already"):
        await server.adapters.load("hood", "h")
    server.adapters.unload("hat")
    await server.adapters.load("hood", "h")


async def test_of_two_loads_at_once_the_first_gets_the_name(server: Server) -> None:
    results = await asyncio.gather(*(server.adapters.load("hat", path) for path in "hs"), return_exceptions=True)
    assert isinstance(results[1], InvalidRequestError)
    assert server.engines.resident == ["h"]


async def test_one_that_is_loading_may_be_named_by_requests_that_begin_without(server: Server) -> None:
    server.engines.gate.clear()
    info = server.adapters.begin("hat", "h")
    assert (info.name, info.parent) == ("hat", "m")
    assert list(server.served.by_name) == ["m"]
    assert server.served.is_taken("hat")
    hat = [Lora("hat", 0.5)]
    with pytest.raises(InvalidRequestError, match="is still loading") as caught:
        server.served.choose("", hat, 0)
    assert caught.value.code == "adapter_loading"
    for choice in server.served.choose("", hat, 3), server.served.choose("hat", (), 3):
        assert (choice.model.name, choice.patches, choice.steps_without) == ("m", (), 3)
        assert server.served.has(choice)
    assert server.served.choose("", [Lora("hat", 0.0)], 0).steps_without == 0, "it is left out"
    waiting = asyncio.create_task(server.served.loaded(server.served.choose("", hat, 3)))
    await settle()
    assert not waiting.done()
    server.engines.gate.set()
    assert await waiting == (Patch("h", 0.5),)
    assert server.served.choose("", hat, 3).steps_without == 0
    assert server.served.by_name["hat"].defaults.num_inference_steps == 4


async def test_the_workflow_of_a_model_may_say_that_its_requests_begin_without(server: Server) -> None:
    server.served.workflows["own"] = replace(INPAINT, name="own", loras={"hat": 0.5}, steps_without_lora=4)
    server.served.by_name["m"] = msgspec.structs.replace(MODEL, workflow="own")
    server.engines.gate.clear()
    server.adapters.begin("hat", "h")
    assert [server.served.choose("", (), steps).steps_without for steps in (0, 9)] == [4, 9]
    with pytest.raises(InvalidRequestError, match="'hat' is still loading; try again"):
        server.served.choose("", (), None)  # a template, whose pages are with it
    server.engines.gate.set()
    await settle()
    assert server.served.choose("", (), 0).patches == (Patch("h", 0.5),)


async def test_one_that_is_unloaded_while_it_loads_is_dropped(server: Server) -> None:
    """Its name is free at once, and those that wait for it fail."""
    server.engines.gate.clear()
    server.adapters.begin("hat", "h")
    choice = server.served.choose("", [Lora("hat")], 3)
    waiting = asyncio.create_task(server.served.loaded(choice))
    await settle()
    server.adapters.unload("hat")
    server.adapters.begin("hat", "s")
    with pytest.raises(InvalidRequestError, match="'hat' was not loaded: it was unloaded"):
        await waiting
    server.engines.gate.set()
    await settle()
    assert server.engines.resident == ["s"]
    assert server.served.by_name["hat"].patch == "s"
    server.adapters.unload("hat")
    await settle()
    with pytest.raises(InvalidRequestError, match="served without adapters"):
        await server.served.loaded(choice)
    assert not server.served.has(choice)


async def test_a_load_in_the_background_is_tried_again_when_engines_have_died(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for ever: its file may be to blame."""
    monkeypatch.setattr(runtime_adapters, "RETRY_SECONDS", 0.0)
    died, down = EngineDeadError("it died"), OverloadedError("No engine is up.", retry_after=1.0)
    server.engines.failing = [died, down, down, down, died]
    server.adapters.begin("hat", "h")
    assert await server.served.loaded(server.served.choose("", [Lora("hat")], 3)) == (Patch("h"),)
    server.engines.failing = [died, died, died]
    server.adapters.begin("cap", "h")
    with pytest.raises(EngineDeadError):
        await server.served.loaded(server.served.choose("", [Lora("cap")], 3))
    assert sorted(server.served.by_name) == ["hat", "m"]


async def test_a_load_in_the_background_that_fails(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Of its file, of its name, which another has got meanwhile, and at a shutdown."""
    server.engines.gate.clear()
    foreground = asyncio.create_task(server.adapters.load("cap", "h"))
    await settle()
    for name, path in (("hat", "bad"), ("cap", "s"), ("hood", "h")):
        server.adapters.begin(name, path)
    for taken in ("hat", "m"):
        with pytest.raises(InvalidRequestError, match=r"is being loaded|is served already"):
            server.adapters.begin(taken, "h")
    hat = asyncio.create_task(server.served.loaded(server.served.choose("", [Lora("hat")], 3)))
    await settle()
    server.engines.gate.set()
    await foreground
    with pytest.raises(InvalidRequestError, match="'hat' was not loaded") as caught:
        await hat
    assert (caught.value.param, caught.value.code) == ("lora", "adapter_not_loaded")
    assert "bad" not in str(caught.value), "another one has named the file"
    await settle()
    assert sorted(server.served.by_name) == ["cap", "hood", "m"]
    assert [line for line in caplog.messages if "cap was not loaded" in line]
    server.engines.gate.clear()
    server.adapters.begin("late", "s")
    late = asyncio.create_task(server.served.loaded(server.served.choose("", [Lora("late")], 3)))
    await settle()
    await server.sessions.drain(0.0)
    with pytest.raises(OverloadedError):
        await late


@pytest.mark.parametrize(
    ("name", "path", "model", "param"),
    [
        ("m", "h", "", "lora_name"),
        ("a b", "h", "", "lora_name"),
        ("", "h", "", "lora_name"),
        ("x" * 513, "h", "", "lora_name"),
        ("hat", "", "", "lora_path"),
        ("hat", "x" * 5000, "", "lora_path"),
        ("hat", "h", "other", "model"),
    ],
)
async def test_what_cannot_be_named_or_found(server: Server, name: str, path: str, model: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await server.adapters.load(name, path, model)
    assert caught.value.param == param
    assert server.engines.resident == []


async def test_only_adapters_are_unloaded_and_only_models_adapted(server: Server) -> None:
    for name in ("m", "hat"):
        with pytest.raises(AdapterNotFoundError, match=name):
            server.adapters.unload(name)
    await server.adapters.load("hat", "h")
    with pytest.raises(ModelNotFoundError):
        await server.adapters.load("cap", "h", "hat")
    assert ModelChoice(msgspec.structs.replace(MODEL)).patches == ()

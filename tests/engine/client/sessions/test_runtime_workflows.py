"""Which workflows are served and kept while names and requests come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import pytest_asyncio
from fakes import MODEL
from run_workflows import DIAMOND, GUARDED

from core.config import EngineConfig, StencilConfig
from core.errors import EngineDeadError, InvalidRequestError, ModelNotFoundError, OverloadedError
from core.graph.workflow import Workflow
from core.handles import ModelKey
from core.messages.worker import DropWorkflow, LoadWorkflow
from core.run_class import RunClass
from engine.client.resolve.bound_model import BoundModel
from engine.client.resolve.served_models import ServedModels
from engine.client.sessions import runtime_workflows
from engine.client.sessions.running_sessions import RunningSessions
from engine.client.sessions.runtime_workflows import RuntimeWorkflows
from engine.client.sessions.session import Session

FIRST = RunClass(name="mixer", path="user_classes:Mixer")

WHOLE = msgspec.structs.replace(
    MODEL, components=tuple(ModelKey("content", kind) for kind in ("text_encoder", "vae", "transformer"))
)


class Engines:
    """Loading waits for the gate; a class called "bad" cannot be loaded, and "deadly" ends the engines."""

    def __init__(self) -> None:
        self.resident: list[str] = ["start"]
        self.gate = asyncio.Event()
        self.gate.set()

    async def add_workflow(self, load: LoadWorkflow) -> None:
        await self.gate.wait()
        names = {each.name for each in load.classes}
        if "bad" in names:
            raise InvalidRequestError("Invalid workflow: bad.")
        if "deadly" in names:
            raise EngineDeadError("it is gone")
        self.resident.append(load.workflow.name)

    def drop_workflow(self, drop: DropWorkflow) -> None:
        if drop.name in self.resident:  # what an engine has not taken yet is dropped, too
            self.resident.remove(drop.name)


class Run(Session):
    """Runs a workflow until told to end."""

    def __init__(self, workflow: Workflow) -> None:
        super().__init__(None, "", 1)
        self.workflow = workflow.name

    def give_up(self) -> None:
        self.done.set()

    async def close(self) -> None:
        await self.done.wait()


class Server:
    def __init__(self) -> None:
        config = EngineConfig(classes=(FIRST,), workflows=(replace(DIAMOND, name="start"), GUARDED_BY_MIXER))
        self.served, self.sessions, self.engines = ServedModels(config), RunningSessions(), Engines()
        self.served.set({"m": WHOLE}, config)
        services = SimpleNamespace(
            served=self.served, sessions=self.sessions, router=self.engines, config=StencilConfig(engine=config)
        )
        self.workflows = RuntimeWorkflows(services, asyncio.Lock())  # type: ignore[arg-type]

    async def register(self, *versions: tuple[str, str]) -> None:
        """Workflows with these (name, class)."""
        classes = {name: RunClass(name=name, path="own_1:Mixer", source="text", file="own.py") for _, name in versions}
        await self.workflows.register([of(*each) for each in versions], classes.values())

    def begin(self, name: str) -> Run:
        return Run(self.served.run_workflows[name])

    @property
    def titles(self) -> list[str]:
        """Of what engines have."""
        return [name.partition("@")[0] for name in self.engines.resident]


def of(name: str, role: str) -> Workflow:
    return replace(DIAMOND, name=name, nodes=tuple(replace(node, role=role) for node in DIAMOND.nodes))


GUARDED_BY_MIXER = replace(
    GUARDED, nodes=tuple(replace(node, role="mixer") if node.op == "run" else node for node in GUARDED.nodes)
)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    async with asyncio.TaskGroup() as tasks:
        server.sessions.start(tasks)
        yield server


async def test_a_name_is_served_until_it_is_removed(server: Server) -> None:
    await server.register(("w", "a"), ("v", "b"))
    assert list(server.served.run_workflows) == ["start", "w", "v"]
    workflow = server.served.run_workflows["w"]
    assert workflow.title == "w"
    assert workflow.name in server.engines.resident
    server.workflows.remove("w")
    assert list(server.served.run_workflows) == ["start", "v"]
    await settle()
    assert server.titles == ["start", "v"]


async def test_the_former_one_is_kept_until_its_last_request_has_ended(server: Server) -> None:
    await server.register(("w", "a"))
    with server.sessions.track(server.begin("w")):
        with server.sessions.track(server.begin("w")):
            await server.register(("w", "b"))
            await settle()
            assert server.titles == ["start", "w", "w"]
        await settle()
        assert server.titles == ["start", "w", "w"]
        server.workflows.remove("w")
        await settle()
        assert server.titles == ["start", "w"]
    await settle()
    assert server.titles == ["start"]


async def test_one_that_comes_back_stays(server: Server) -> None:
    """It is told to no engine again: these have it."""
    await server.register(("w", "a"))
    with server.sessions.track(server.begin("w")):
        await server.register(("w", "b"))
        await server.register(("w", "a"))
        server.workflows.remove("w")
        await server.register(("w", "a"))
    await settle()
    assert server.titles == ["start", "w"]
    await server.register(("w", "a"))
    assert server.titles == ["start", "w"]


async def test_one_of_the_start_is_replaced_and_removed(server: Server) -> None:
    await server.register(("start", "a"))
    await settle()
    assert server.engines.resident == [server.served.run_workflows["start"].name]
    server.workflows.remove("start")
    await settle()
    assert server.engines.resident == []


async def test_a_file_is_served_whole_or_not_at_all(server: Server) -> None:
    await server.register(("w", "a"))
    for name, raised in (("bad", InvalidRequestError), ("deadly", OverloadedError)):
        with pytest.raises(raised):
            await server.register(("w", "b"), ("v", name))
        assert server.titles == ["start", "w"]
        assert list(server.served.run_workflows) == ["start", "w"]
    await server.register(("v", "b"))
    assert server.titles == ["start", "w", "v"]


@pytest.mark.parametrize(("name", "code"), [("m", "name_taken"), ("guarded", "name_taken"), ("inpaint", "name_taken")])
async def test_names_of_models_and_of_workflows_for_pictures_are_taken(server: Server, name: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await server.register((name, "a"))
    assert caught.value.code == code
    for unknown in (name, "none"):
        with pytest.raises(ModelNotFoundError):
            server.workflows.remove(unknown)
    assert server.titles == ["start"]


@pytest.mark.parametrize("name", ["", "w@1", "a b", "x" * 65])
async def test_a_forged_name_is_refused(server: Server, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await server.register(("w", "a"), (name, "a"))
    assert caught.value.param == "workflow"
    assert server.titles == ["start"]


async def test_a_class_that_is_not_there_is_refused(server: Server) -> None:
    with pytest.raises(InvalidRequestError, match="names a class 'a' that it has not"):
        await server.workflows.register([of("w", "a")], [FIRST])


async def test_one_that_makes_a_models_pictures_is_a_name_for_the_model(server: Server) -> None:
    """Also where the name was one of classes alone, and is again."""
    served, pictures = server.served, replace(GUARDED_BY_MIXER, name="w")
    before = served.workflows
    await server.register(("w", "a"))
    await server.workflows.register([pictures], [FIRST])
    await settle()
    assert list(served.run_workflows) == ["start"]
    assert list(served.by_name) == ["m", "w"]
    info = served.by_name["w"]
    assert (info.name, info.workflow.partition("@")[0]) == ("m", "w")
    new = {name.partition("@")[0] for name in served.workflows.keys() - before.keys()}
    assert new == {"w", "controlled_w", "selected_w", "selected_controlled_w", "recalled_w"}
    assert server.titles == ["start", "w"]
    with server.sessions.track(Run(served.workflows[info.workflow])):
        await server.register(("w", "a"))
        await settle()
        assert (list(served.by_name), list(served.run_workflows)) == (["m"], ["start", "w"])
        assert info.workflow in served.workflows
    await settle()
    assert served.workflows == before
    assert server.titles == ["start", "w"]


async def test_a_server_without_what_a_workflow_needs_refuses_it(server: Server) -> None:
    pictures = replace(GUARDED_BY_MIXER, name="w")
    with pytest.raises(InvalidRequestError, match="'w': m has no adapter 'style'; load it"):
        await server.workflows.register([replace(pictures, loras={"style": 1.0})], [FIRST])
    with pytest.raises(ModelNotFoundError):
        await server.workflows.register([pictures], [FIRST], BoundModel("other"))
    for bound, param in ((BoundModel("m"), "model"), (BoundModel("", {"refiner": "m"}), "refiner")):
        with pytest.raises(InvalidRequestError, match="leave it out") as caught:
            await server.workflows.register([of("w", "mixer")], [FIRST], bound)
        assert caught.value.param == param
    assert server.titles == ["start"]


async def test_a_class_that_workers_have_otherwise_is_refused(server: Server) -> None:
    other = RunClass(name="mixer", path=FIRST.path, seconds=1.0)
    with pytest.raises(InvalidRequestError, match="class 'mixer' with other attributes"):
        await server.workflows.register([of("w", "mixer")], [other])
    await server.workflows.register([of("w", "mixer")], [FIRST])


async def test_there_are_not_more_than_may_be(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.register(("w", "a"))
    monkeypatch.setattr(runtime_workflows, "MAX_WORKFLOWS", 2)
    with pytest.raises(InvalidRequestError, match="2 workflows are served already"):
        await server.register(("v", "a"))
    await server.register(("w", "b"))
    await settle()
    monkeypatch.setattr(runtime_workflows, "MAX_BYTES", 100)
    with pytest.raises(InvalidRequestError, match="may take 100 bytes together"):
        await server.register(("w", "a"))
    assert server.titles == ["start", "w"]


async def test_a_shutdown_ends_what_waits_for_engines(server: Server) -> None:
    server.engines.gate.clear()
    waiting = [asyncio.create_task(server.register((name, "a"))) for name in ("w", "v")]
    await settle()
    await server.sessions.drain(0.0)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [OverloadedError] * 2


async def test_a_shutdown_does_not_wait_for_the_readers_of_one_that_was_removed() -> None:
    server, is_read = Server(), asyncio.Event()

    async def read() -> None:
        with server.sessions.track(server.begin("w")):
            await is_read.wait()

    async with asyncio.TaskGroup() as callers:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            server.sessions.start(tasks)
            await server.register(("w", "a"))
            callers.create_task(read())
            await settle()
            server.workflows.remove("w")
            await settle()
            await server.sessions.drain(0.0)
        is_read.set()
    assert server.titles == ["start", "w"], "the engines end with it"

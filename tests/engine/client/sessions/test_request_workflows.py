"""Which workflows engines have while requests that brought them come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import pytest_asyncio
from run_workflows import DIAMOND

from core.config import EngineConfig
from core.errors import EngineDeadError, OverloadedError, WorkflowError
from core.graph.workflow import Workflow
from core.graph.workflows.inpaint import INPAINT
from core.messages.worker import DropWorkflow, LoadWorkflow
from engine.client.resolve.served_models import ServedModels
from engine.client.sessions import request_workflows
from engine.client.sessions.request_workflows import RequestWorkflows
from engine.client.sessions.running_sessions import RunningSessions
from engine.client.sessions.session import Session


class Engines:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.error: BaseException | None = None

    async def add_workflow(self, load: LoadWorkflow) -> None:
        assert load.classes == ()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.names.append(load.workflow.name)

    def drop_workflow(self, drop: DropWorkflow) -> None:
        if drop.name in self.names:
            self.names.remove(drop.name)


class Run(Session):
    def __init__(self, workflow: str) -> None:
        super().__init__(None, "", 1)
        self.workflow = workflow

    def give_up(self) -> None:
        self.done.set()

    async def close(self) -> None:
        await self.done.wait()


class Server:
    def __init__(self) -> None:
        self.served, self.sessions, self.engines = ServedModels(EngineConfig()), RunningSessions(), Engines()
        services = SimpleNamespace(served=self.served, sessions=self.sessions, router=self.engines)
        self.workflows = RequestWorkflows(services)  # type: ignore[arg-type]

    @property
    def kept(self) -> set[str]:
        return {name for name in self.served.workflows if "@" in name}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    async with asyncio.TaskGroup() as tasks:
        server.sessions.start(tasks)
        yield server


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def of(number: int) -> Workflow:
    """Workflows of one name, all of which differ."""
    nodes = tuple(
        replace(node, literals={"seed": number}) if node.op == "image_encode" else node for node in INPAINT.nodes
    )
    return replace(INPAINT, name="graph", nodes=nodes)


async def test_equal_workflows_are_one(server: Server) -> None:
    use, first = server.workflows.use, of(1)
    async with use(first) as one, use(replace(first, defaults={"seed": 3})) as same, use(of(2)) as other:
        assert one == same != other
        assert server.engines.names == [one, other]
        assert server.served.workflows[one].nodes == first.nodes
        assert server.served.workflows[one].title == "graph"


async def test_two_that_come_at_once_wait_for_one_load(server: Server) -> None:
    async def use() -> None:
        async with server.workflows.use(of(1)):
            assert len(server.engines.names) == 1

    await asyncio.gather(*(use() for _ in range(3)))
    assert len(server.engines.names) == 1


async def test_the_one_used_longest_ago_is_forgotten_unless_it_runs(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_workflows, "MAX_KEPT", 2)
    names = list[str]()
    for number in (1, 2, 1, 3):
        async with server.workflows.use(of(number)) as name:
            names.append(name)
    await settle()
    assert server.engines.names == [names[0], names[3]]
    assert server.kept == {names[0], names[3]}
    run = Run(names[0])
    with server.sessions.track(run):
        for number in (4, 5):
            async with server.workflows.use(of(number)) as name:
                names.append(name)
        await settle()
        assert set(server.engines.names) == {names[0], names[5]}
    async with server.workflows.use(of(6)) as name:
        await settle()
    await settle()
    assert names[0] not in server.kept
    assert server.kept == set(server.engines.names)
    assert len(server.kept) == 2


async def test_one_that_is_used_is_kept(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_workflows, "MAX_KEPT", 0)
    async with server.workflows.use(of(1)) as first:
        async with server.workflows.use(of(2)):
            pass
        await settle()
        assert server.engines.names == [first]
    await settle()
    assert server.engines.names == []


@pytest.mark.parametrize("error", [EngineDeadError("it is gone"), asyncio.CancelledError()])
async def test_one_that_engines_do_not_take_is_not_kept(server: Server, error: BaseException) -> None:
    server.engines.error = error
    with pytest.raises(OverloadedError if isinstance(error, EngineDeadError) else asyncio.CancelledError):
        async with server.workflows.use(of(1)):
            raise AssertionError("it was taken")
    assert server.kept == set()
    server.engines.error = None
    async with server.workflows.use(of(1)) as name:
        assert server.engines.names == [name]


async def test_users_classes_cannot_be_brought(server: Server) -> None:
    with pytest.raises(WorkflowError, match="brings no classes"):
        async with server.workflows.use(DIAMOND):
            raise AssertionError("it was taken")
    assert server.engines.names == []

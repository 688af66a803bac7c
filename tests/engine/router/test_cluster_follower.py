"""A router whose engines follow a cluster: machines join, are about to leave, leave and die. Router and engines are
real, the cluster and the workers are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq.asyncio
from test_incarnations import Backend, Calls, Engine, edit

from core.config import EngineConfig, ModelConfig, StencilConfig
from core.errors import ConfigError, EngineDeadError, EngineError, StencilError
from core.messages.engine import DropTemplate, Failed
from core.routing.placement import Machine
from engine.observability.metrics import Metrics
from engine.router import cluster_follower, engine_replica
from engine.router.router import Router

AUTO = EngineConfig(
    models=(ModelConfig(served_model_name="m"),), data_parallel_size=0, data_parallel_backend="ray", ray_address="a:1"
)


class Machines(Backend):
    """A cluster, and what starts engines there."""

    def __init__(self, folder: Path, **rooms: int) -> None:
        super().__init__(folder)
        self.there = {name: Machine(name, room) for name, room in rooms.items()}
        self.started: list[str] = []  # machine of each engine
        self.error: StencilError | None = None
        self.broken = False  # nothing can be started
        self.silent = False  # what is started never serves
        self.answering, self.num_asked = asyncio.Event(), 0
        self.answering.set()

    async def machines(self) -> dict[str, Machine]:
        self.num_asked += 1
        await self.answering.wait()
        if self.error is not None:
            raise self.error
        return dict(self.there)

    def start(self, config: EngineConfig, epoch: int, socket: zmq.asyncio.Socket) -> Engine:
        if self.broken:
            raise ConfigError("there is no model")
        self.started.append(config.machine)
        return super().start(config, epoch + self.silent, socket)

    def drain(self, name: str) -> None:
        self.there[name] = self.there[name]._replace(is_draining=True)


@asynccontextmanager
async def following(machines: Machines) -> AsyncIterator[Router]:
    config = StencilConfig(engine=AUTO)
    router = Router(config, machines, Metrics(), machines)
    router.engines.start()
    running = asyncio.create_task(router.engines.run())
    try:
        async with asyncio.timeout(20):
            yield router
            await router.stop()
            await running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await router.engines.close()
    assert isinstance(await router.engines.failed(), StencilError)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


def alive_series(router: Router) -> set[str]:
    text = router._metrics.exposition().decode()
    return {line.split('"')[1] for line in text.splitlines() if line.startswith("stencil:engine_alive{")}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_follower, "LOOK_SECONDS", 0.01)


async def test_engines_follow_the_machines(tmp_path: Path) -> None:
    machines = Machines(tmp_path, a=1)
    async with following(machines) as router:
        assert (router.engines.error, router.engines.is_ready, router.engines.loads) == (None, False, [])
        assert [*await router.engines.ready()] == ["m"]
        machines.there["b"] = Machine("b", 2)
        await until(lambda: router.engines.alive == [True, True, True])
        assert machines.started == ["a", "b", "b"]
        calls = Calls(router)
        for name in "stuv":
            calls.submit(edit(name))
        await calls.ended()
        assert all(engine.workers.workers.denoised for engine in machines.engines), "each gets requests"
        assert alive_series(router) == {"0", "1", "2"}
        del machines.there["b"]
        await until(lambda: router.engines.ranks == [0])
        assert (router.engines.alive, alive_series(router), router.engines.error) == ([True], {"0"}, None)
        machines.there["c"] = Machine("c", 1)
        await until(lambda: router.engines.alive == [True, True])
        assert (router.engines.ranks, machines.started[3:]) == ([0, 1], ["c"])


async def test_an_engine_of_a_machine_about_to_leave_does_what_it_has_and_gets_no_more(tmp_path: Path) -> None:
    machines = Machines(tmp_path, a=1, b=1)
    async with following(machines) as router:
        await router.engines.ready()
        await until(lambda: router.engines.alive == [True, True])
        calls = Calls(router)
        for engine in machines.engines:
            engine.workers.is_hung = True
        calls.submit(edit("s"))
        calls.submit(edit("t"))
        await until(lambda: router.has_begun("s") and router.has_begun("t"))
        leaving = router.engine_of("s")
        assert leaving is not None
        machines.drain(machines.started[leaving])
        await until(lambda: router.engines.states[leaving][0] == "draining")
        await asyncio.sleep(0.05)
        assert (len(router.engines.ranks), router.engines.alive[leaving], router.engines.is_ready) == (2, False, True)
        calls.submit(edit("u"))
        assert router.engine_of("u") == 1 - leaving
        router.drop(DropTemplate("m", "0", ""))
        for engine in machines.engines:
            engine.workers.is_hung = False
            engine.workers._run()
        await calls.ended()
        assert "\nstencil:request_retries_total 0.0\n" in router._metrics.exposition().decode()
        assert "s" in machines.engines[leaving].workers.workers.denoised
        await until(lambda: router.engines.ranks == [1 - leaving])
        assert len(machines.started) == 2


async def begun_on_a_hung_engine(machines: Machines, router: Router) -> Calls:
    """Calls with a request "s", which the first engine has begun and does not end."""
    await router.engines.ready()
    calls = Calls(router)
    machines.engines[0].workers.is_hung = True
    calls.submit(edit("s"))
    await until(lambda: router.has_begun("s"))
    return calls


async def test_an_engine_that_dies_while_its_machine_is_about_to_leave_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests wait for another machine."""
    machines = Machines(tmp_path, a=1)
    async with following(machines) as router:
        calls = await begun_on_a_hung_engine(machines, router)
        machines.drain("a")
        await until(lambda: router.engines.states[0][0] == "draining")
        with monkeypatch.context() as patch:
            patch.setattr(machines, "answering", asyncio.Event())  # no look, which would end it for good
            replica = router.engines.replicas[0]
            machines.engines[0].kill()
            await until(lambda: replica.error is not None or len(machines.started) > 1)
            assert (machines.started, router.num_waiting, router.engines.error) == (["a"], 1, None)
            machines.answering.set()
        await until(lambda: not router.engines.ranks)
        machines.there["b"] = Machine("b", 1)
        await calls.ended()
        assert machines.started == ["a", "b"]


async def test_requests_of_the_last_machine_wait_for_the_next_one(tmp_path: Path) -> None:
    machines = Machines(tmp_path, a=1)
    async with following(machines) as router:
        calls = await begun_on_a_hung_engine(machines, router)
        del machines.there["a"]
        await until(lambda: not router.engines.ranks)
        engines = router.engines
        assert (router.num_waiting, engines.is_ready, engines.error, engines.is_served("m")) == (1, False, None, False)
        machines.there["b"] = Machine("b", 1)
        await calls.ended()
        assert machines.started == ["a", "b"]
        (state, restarts), *_ = router.engines.states
        assert (state, restarts) == ("serving", 0)


async def test_they_wait_too_where_another_machine_cannot_serve(tmp_path: Path) -> None:
    machines = Machines(tmp_path, a=1)
    async with following(machines) as router:
        await router.engines.ready()
        machines.broken, machines.there["b"] = True, Machine("b", 1)
        await until(lambda: len(router.engines.ranks) == 2 and router.engines.states[1][0] == "gone")
        machines.broken = False
        del machines.there["a"]
        await until(lambda: router.engines.ranks == [1])
        assert (router.engines.error, router.engines.error_of("m")) == (None, None)
        calls = Calls(router)
        calls.submit(edit("s"))
        machines.there["c"] = Machine("c", 1)
        await calls.ended()
        assert machines.started == ["a", "c"]


async def test_what_waits_for_a_machine_is_told_when_there_will_be_none(tmp_path: Path) -> None:
    machines = Machines(tmp_path, a=1)
    async with following(machines) as router:
        await router.engines.ready()
        del machines.there["a"]
        await until(lambda: not router.engines.ranks)
        calls = Calls(router)
        calls.submit(edit("s"))
        router.engines.fail(EngineError("internal error"))
        (output,) = calls.told["s"]
        assert isinstance(output, Failed)
        assert output.failure.message == "internal error"


async def test_an_engine_that_dies_starts_again_on_its_machine_while_that_is_there(tmp_path: Path) -> None:
    machines = Machines(tmp_path, a=1)
    async with following(machines) as router:
        await router.engines.ready()
        machines.engines[0].kill()
        await until(lambda: len(machines.engines) == 2 and router.engines.alive == [True])
        assert machines.started == ["a", "a"]


async def test_an_engine_that_differs_from_the_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(engine: Engine, grace: float) -> None:
        engine.kill()
        await engine.wait()

    monkeypatch.setattr(Engine, "stop", stop)
    machines = Machines(tmp_path, a=1)
    async with following(machines) as router:
        models = await router.engines.ready()
        like = router.engines._like
        assert like is not None
        like._models = {"m": msgspec.structs.replace(models["m"], dtype="other")}
        machines.there["b"] = Machine("b", 1)
        await until(lambda: len(machines.started) == 2)
        await until(lambda: router.engines.states[1][1] > 0)
        assert (router.engines.alive, router.engines.states[1][0]) == ([True, False], "loading")


async def test_a_machine_whose_room_others_have_keeps_no_engine_from_starting_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_replica, "PLACE_SECONDS", 0.1)
    monkeypatch.setattr(Engine, "placed", None)
    machines = Machines(tmp_path, a=1, b=1)
    machines.silent = True
    async with following(machines) as router:
        await until(lambda: machines.started == ["a"])
        machines.silent = False
        await router.engines.ready()
        await until(lambda: machines.started == ["a", "b", "a"])  # again, since it has to be like the first that serves
        await until(lambda: router.engines.alive == [True, True])
        (again,) = [each for each in router.engines.replicas.values() if each is not router.engines._like]
        assert (again.machine, again._models, router.engines.error) == ("a", router.engines.models, None)
        del machines.there["a"]
        await until(lambda: router.engines.alive == [True])


async def test_a_cluster_without_room_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines(tmp_path, head=0)
    async with following(machines) as router:
        await asyncio.sleep(0.05)
        machines.error = EngineError("no answer")
        await asyncio.sleep(0.05)
        machines.error, machines.there["a"] = None, Machine("a", 1)
        await router.engines.ready()
    assert warnings(caplog) == [
        "no machine of the cluster has room for an engine",
        "the cluster does not answer: no answer",
    ]


async def test_a_cluster_that_is_silent_is_asked_once_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_follower, "TELL_SECONDS", 0.02)
    machines = Machines(tmp_path, a=1)
    machines.answering.clear()
    async with following(machines) as router:
        await asyncio.sleep(0.1)
        assert machines.num_asked == 1
        machines.answering.set()
        await router.engines.ready()
        machines.answering.clear()  # and the server can stop all the same
        await until(lambda: len(warnings(caplog)) == 2)
    assert {*warnings(caplog)} == {"the cluster does not answer: nothing came in 0.02 s"}


async def test_an_idle_engine_whose_machine_has_left_gets_no_request_while_it_ends(tmp_path: Path) -> None:
    machines = Machines(tmp_path, a=1, b=1)
    async with following(machines) as router:
        await router.engines.ready()
        await until(lambda: router.engines.alive == [True, True])
        machines.engines[0].workers.is_hung = machines.engines[1].workers.is_hung = True
        calls = Calls(router)
        router.engines.end_engine(0, "the engine's machine has left")
        for name in "stuv":
            calls.submit(edit(name))
            assert router.engine_of(name) == 1
        machines.engines[1].workers.is_hung = False
        machines.engines[1].workers._run()
        await calls.ended()


async def test_a_cluster_that_cannot_be_joined_ends_the_server(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    machines.error = ConfigError("there is no Ray cluster")
    async with following(machines) as router:
        with pytest.raises(ConfigError, match="there is no Ray cluster"):
            await router.engines.ready()
        with pytest.raises(EngineDeadError):
            router.submit(edit("s"), lambda output: None)


async def test_a_model_that_cannot_be_started_ends_the_server(tmp_path: Path) -> None:
    machines = Machines(tmp_path, a=1, b=1)
    machines.broken = True
    async with following(machines) as router:
        with pytest.raises(ConfigError, match="there is no model"):
            await router.engines.ready()
        assert str(await router.engines.failed()) == "there is no model"
        machines.broken, machines.there["c"] = False, Machine("c", 1)
        await asyncio.sleep(0.05)
        assert (router.engines.ranks, machines.started) == ([0], []), "it is given up for good"

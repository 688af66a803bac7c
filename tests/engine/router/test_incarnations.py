"""A router and an engine, both real, whose messages come twice or late, or between which clocks differ by days. The
engine runs in the test's process, and its workers are fakes.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from fakes import MODEL, make_edit, with_spec
from loopback import Loopback

from core.config import EngineConfig, ModelConfig, SchedulerConfig, StencilConfig
from core.handles import ArrayRef
from core.messages.engine import DropTemplate, EngineReady, EngineRequest, Finished, Output
from core.messages.worker import BatchResult, FromWorker
from core.routing.request_shape import RequestShape
from core.scheduling.scheduler import StepScheduler
from engine.engine_core import engine_core, engine_process
from engine.engine_core.engine_core import EngineCore
from engine.engine_core.engine_process import Link
from engine.observability.metrics import Metrics
from engine.router.engine_backend import MachineLink
from engine.router.engine_client import EngineClient
from engine.router.router import Router

CONFIG = StencilConfig(engine=EngineConfig(models=(ModelConfig(served_model_name="m"),)))
DAYS_AHEAD = 86400.0 * 30


class Socket:
    """A socket that keeps what passes through it. times: how often it sends each message."""

    def __init__(self, socket: zmq.asyncio.Socket, times: int) -> None:
        self.sent: list[bytes] = []
        self.received: list[bytes] = []
        self._socket, self._times = socket, times

    def send(self, payload: bytes, flags: int) -> asyncio.Future[Any]:
        self.sent.append(payload)
        return [self._socket.send(payload, flags) for _ in range(self._times)][-1]

    async def recv(self) -> bytes:
        self.received.append(await self._socket.recv())
        return self.received[-1]


class Workers(Loopback):
    """Their clock is the engine's."""

    def say(self, message: FromWorker) -> None:
        if isinstance(message, BatchResult):
            now = engine_core.time.monotonic()
            message = msgspec.structs.replace(message, started=now - message.seconds)
        super().say(message)


class Engine:
    """An engine, see StartedEngine."""

    def __init__(self, address: str, epoch: int, times: int) -> None:
        self.workers = Workers()
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        self.socket = Socket(socket, times)
        self._end_socket = socket.close
        self._task = asyncio.create_task(self._run(epoch))

    async def _run(self, epoch: int) -> None:
        link: Link = Link(self.socket, epoch, hang_seconds=20.0)  # type: ignore[arg-type]
        core = self.workers.core = EngineCore(StepScheduler(SchedulerConfig(), {"m": MODEL}), self.workers, link.emit)
        link.emit(EngineReady(models=(MODEL,)))
        try:
            async with asyncio.TaskGroup() as tasks:
                feeder = tasks.create_task(link.feed(core))
                await core.run()
                feeder.cancel()
        finally:
            link.close()

    placed: float | None = 0.0
    link: MachineLink | None = None

    async def wait(self) -> None:
        await asyncio.wait([self._task])

    async def stop(self, grace: float) -> None:
        await asyncio.wait_for(asyncio.shield(self.wait()), grace)

    def kill(self) -> None:
        self._task.cancel()

    def describe_exit(self) -> str:
        return "ended"

    def close(self) -> None:
        self._end_socket()
        self._context.term()


class Backend:
    """See EngineBackend. times: how often each message of an engine is sent."""

    def __init__(self, folder: Path, times: int = 1) -> None:
        self.engines: list[Engine] = []
        self._folder, self._times = folder, times

    def start(self, config: EngineConfig, epoch: int, socket: zmq.asyncio.Socket) -> Engine:
        address = f"ipc://{self._folder}/{len(self.engines)}"
        socket.bind(address)
        self.engines.append(Engine(address, epoch, self._times))
        return self.engines[-1]

    async def close(self) -> None:
        pass


@asynccontextmanager
async def serving(backend: Backend) -> AsyncIterator[Router]:
    router = Router(CONFIG, backend, Metrics())
    router.engines.start()
    running = asyncio.create_task(router.engines.run())
    try:
        async with asyncio.timeout(20):
            await router.engines.ready()
            yield router
            await router.stop()
            await running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await router.engines.close()


class Calls:
    """Requests and what is said of each."""

    def __init__(self, router: Router) -> None:
        self.told: dict[str, list[Output]] = {}
        self._router = router

    def submit(self, request: EngineRequest) -> None:
        outputs = self.told[request.request_id] = []
        self._router.submit(request, outputs.append)

    async def ended(self) -> dict[str, Finished]:
        while not all(self.told.values()):
            await asyncio.sleep(0)
        for outputs in self.told.values():
            assert [type(output) for output in outputs] == [Finished], outputs
        return {name: outputs[0] for name, outputs in self.told.items()}  # type: ignore[misc]


def edit(name: str, **times: float) -> EngineRequest:
    return make_edit(name, arrival=time.monotonic(), **times)


async def test_a_message_that_comes_twice_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(tmp_path, times=2)
    async with serving(backend) as router:
        client = router.engines.replicas[0]._client
        send = client._send_bytes
        monkeypatch.setattr(client, "_send_bytes", lambda payload: [send(payload), send(payload)])
        calls, (engine,) = Calls(router), backend.engines
        for name in "abc":
            calls.submit(edit(name))
        await calls.ended()
        calls.submit(edit("d"))
        await calls.ended()
        assert len(engine.socket.received) == 8, "each of them has come twice"
        assert engine.workers.workers.denoised.keys() == {*"abcd"}
        assert all(len(steps) == 4 for steps in engine.workers.workers.denoised.values())
        assert router.engines.loads[0] is not None
        assert (router.engines.loads[0].num_received, router.engines.fleet.is_alive[0]) == (4, True)


async def test_what_another_incarnation_has_sent_or_was_sent_does_nothing(tmp_path: Path) -> None:
    backend = Backend(tmp_path)
    async with serving(backend) as router:
        calls = Calls(router)
        calls.submit(edit("a"))
        await calls.ended()
        backend.engines[0].kill()
        while len(backend.engines) == 1 or not router.engines.is_ready:
            await asyncio.sleep(0.01)
        first, second = (engine.socket for engine in backend.engines)
        client = router.engines.replicas[0]._client
        for payload in first.sent:
            second.send(payload, zmq.NOBLOCK)
        for payload in first.received:
            client._send_bytes(payload)
        calls.submit(edit("b"))
        await calls.ended()
        assert len(second.received) == len(first.received) + 1
        assert backend.engines[1].workers.workers.denoised.keys() == {"b"}
        assert router.engines.loads[0] is not None
        assert (router.engines.loads[0].num_received, len(backend.engines)) == (1, 2)


async def test_a_message_that_is_lost_ends_the_engine_and_its_request_goes_to_the_next(tmp_path: Path) -> None:
    backend = Backend(tmp_path)
    async with serving(backend) as router:
        calls, client = Calls(router), router.engines.replicas[0]._client
        client._envelopes.seal(edit("lost"))
        calls.submit(edit("a"))
        await calls.ended()
        assert len(backend.engines) == 2
        assert router.engines.error is None


class LackingBackend(Backend):
    """Its first engine starts, the next has no room on the disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.refusals = [OSError(errno.ENOSPC, "No space left on device")]

    def start(self, config: EngineConfig, epoch: int, socket: zmq.asyncio.Socket) -> Engine:
        if self.engines and self.refusals:
            raise self.refusals.pop()
        return super().start(config, epoch, socket)


async def test_an_engine_that_the_machine_has_no_room_for_is_started_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First no descriptor is left for its socket, then none of the disk. Its request waits."""
    monkeypatch.setattr("core.restarts.FIRST_WAIT_SECONDS", 0.01)
    backend, make, refusals = LackingBackend(tmp_path), zmq.asyncio.Context, [zmq.ZMQError(errno.EMFILE)]

    def context() -> zmq.asyncio.Context:
        if refusals:
            raise refusals.pop()
        return make()

    async with serving(backend) as router:
        monkeypatch.setattr(zmq.asyncio, "Context", context)
        calls = Calls(router)
        backend.engines[0].kill()
        while not refusals == backend.refusals == []:
            await asyncio.sleep(0.005)
        calls.submit(edit("a"))
        await calls.ended()
        assert len(backend.engines) == 2
    for why in ("Too many open files", "[Errno 28] No space left on device"):
        assert f"the engine cannot be started: {why}" in caplog.text


async def test_an_engine_that_is_down_is_told_of_the_last_templates_that_were_dropped_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for a machine for ever, and nothing must grow meanwhile."""
    monkeypatch.setattr("engine.router.engine_replica.MOST_LATE_DROPS", 3)
    backend, dropped = Backend(tmp_path), list[str]()
    monkeypatch.setattr(
        EngineClient, "drop", lambda client, template: dropped.append(template.content_id) if client.is_ready else None
    )
    router = Router(CONFIG, backend, Metrics())
    for number in range(7):
        router.drop(DropTemplate("m", f"{number}"))
    router.engines.start()
    running = asyncio.create_task(router.engines.run())
    async with asyncio.timeout(20):
        await router.engines.ready()
        assert dropped == ["4", "5", "6"]
        await router.stop()
        await running
    await router.engines.close()


async def test_clocks_may_differ_between_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a request that is sent again, to an engine whose clock is yet another, lose its time."""
    clocks = iter((DAYS_AHEAD, -DAYS_AHEAD))

    def next_clock() -> None:
        ahead = next(clocks)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
        for module in (engine_core, engine_process):
            monkeypatch.setattr(module, "time", clock)

    next_clock()
    backend = Backend(tmp_path)
    async with serving(backend) as router:
        calls, submitted = Calls(router), time.monotonic()
        calls.submit(edit("a", deadline=submitted + 60.0))
        await calls.ended()
        backend.engines[0].workers.is_hung = True
        calls.submit(edit("b", deadline=submitted + 60.0))
        while not router.has_begun("b"):
            await asyncio.sleep(0)
        next_clock()
        backend.engines[0].kill()
        ended = await calls.ended()
        assert len(backend.engines) == 2
        for finished in ended.values():
            assert submitted < finished.made < time.monotonic()
            assert abs(finished.ms["queue"]) < 20_000
        samples = router.engines.recent_steps[0]
        assert samples
        assert all(submitted - 1.0 < sample.started < time.monotonic() for sample in samples), "less a fake's step"


async def test_the_way_to_another_machine_is_part_of_predictions(tmp_path: Path) -> None:
    backend = Backend(tmp_path)
    async with serving(backend) as router:
        read = ArrayRef(0, 4096, (64, 64, 3), "uint8")
        calls, shape = Calls(router), RequestShape.of_request(with_spec(make_edit("a"), template=read), MODEL)
        for byte_seconds in (0.5, 2.0):  # as it is at each report
            backend.engines[0].link = MachineLink("10.0.0.2", 0.0, byte_seconds)
            calls.submit(edit(f"at {byte_seconds}"))
            await calls.ended()
            there, back = router.engines.fleet.copy_seconds(shape)
            assert there[0] == byte_seconds * shape.copied.read > 0
            assert back[0] == byte_seconds * shape.copied.written > 0

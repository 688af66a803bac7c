"""Both ends of the way to an engine of another machine: what requests read and make is where it belongs, whatever is
lost between them, and nothing is kept afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import numpy as np
import pytest
from fakes import make_edit, make_hires_edit, make_selecting_edit, with_spec

from core.costs.load_report import LoadReport
from core.errors import ConfigError, EngineDeadError, EngineError, MessageError, OutOfMemoryError
from core.failure import Failure
from core.handles import ArrayRef, Artefact
from core.ipc.shared_array import Arena, ArenaAllocator, array_bytes
from core.messages.codec import MessageDecoder
from core.messages.engine import (
    Aborted,
    EngineFailed,
    EngineOutputs,
    EngineRequest,
    Failed,
    Finished,
    FromEngine,
    PartialImage,
    PrimeTemplate,
    TemplatePrimed,
    ToEngine,
)
from core.messages.envelope import Envelopes, with_body
from core.messages.request_arrays import arrays_read, arrays_written, moved
from engine.cluster import connection
from engine.cluster.courier import Ends
from engine.cluster.host_courier import HostCourier
from engine.cluster.link import Frames
from engine.cluster.pace import Pace
from engine.cluster.server_courier import ServerCourier

EPOCH = 2**64 - 7
ARENA_BYTES = 1 << 24


class Way:
    """Both couriers, and where an engine would be. Each message between them is lost with a probability, and with it
    all that is under way there."""

    def __init__(self, seed: int, loss: float, host_bytes: int = ARENA_BYTES) -> None:
        self._random, self._loss = random.Random(seed), loss
        self.arenas = Arena.create(0, ARENA_BYTES), Arena.create(0, host_bytes)
        self.server_arena, self.host_arena = self.arenas
        self.memory = ArenaAllocator(self.server_arena)
        self._to_host: deque[tuple[bytes, list[bytes]]] = deque()
        self._to_server: deque[tuple[bytes, list[bytes]]] = deque()
        self._ends = Envelopes(EPOCH), Envelopes(EPOCH)  # of the API server and of the engine
        self.told: list[FromEngine] = []
        self.requests: dict[str, EngineRequest | PrimeTemplate] = {}  # that the engine has, with arrays of its machine
        self.refused: list[bytes] = []  # messages that the engine cannot decode
        self.server = ServerCourier(
            EPOCH, Ends(self.server_arena, self._sender(self._to_host), self._on_told, self._fail, 60)
        )
        self.host = HostCourier(
            EPOCH, "10.0.0.2", Ends(self.host_arena, self._sender(self._to_server), self._on_request, self._fail, 60)
        )

    def _fail(self) -> None:
        raise AssertionError("nobody was silent")

    @property
    def host_bytes(self) -> int:
        """Bytes of the arrays of all requests on the engine's machine."""
        return self.host._allocator.used_bytes

    def _sender(self, queue: deque[tuple[bytes, list[bytes]]]):  # type: ignore[no-untyped-def]
        def send(link: bytes, frames: Frames) -> None:
            queue.append((link, [bytes(frame) for frame in frames]))
            if self._random.random() < self._loss:
                queue.clear()

        return send

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.server.run())
            tasks.create_task(self.host.run())
            while True:
                for queue, end in ((self._to_host, self.host), (self._to_server, self.server)):
                    if queue:
                        end.receive(*queue.popleft())
                await asyncio.sleep(0)

    def _on_told(self, payload: bytes) -> None:
        opened = self._ends[0].open(payload)
        assert opened is not None
        decoder: MessageDecoder[FromEngine] = MessageDecoder(FromEngine)
        self.told.append(decoder.decode(opened.body))

    def _on_request(self, payload: bytes) -> None:
        opened = self._ends[1].open(payload)
        assert opened is not None
        decoder: MessageDecoder[ToEngine] = MessageDecoder(ToEngine)
        try:
            message = decoder.decode(opened.body)
        except MessageError:
            return self.refused.append(bytes(opened.body))
        assert isinstance(message, EngineRequest | PrimeTemplate)
        self.requests[message.request_id] = message

    def ask(self, request: EngineRequest | PrimeTemplate) -> EngineRequest | PrimeTemplate:
        """Send a request with arrays of random content; the request as it was sent."""
        placed = self.placed(request)
        self.server.send(self._ends[0].seal(placed))
        return placed

    def placed(self, request: EngineRequest | PrimeTemplate) -> EngineRequest | PrimeTemplate:
        """A request with arrays of random content in the API server's arena."""
        offsets: dict[int, int] = {}
        for ref in [*arrays_read(request), *arrays_written(request)]:
            offsets[ref.offset] = self.memory.alloc(array_bytes(ref)).offset
        placed = moved(request, offsets)
        for ref in arrays_read(placed):
            fill(self.server_arena, ref, self._random.randbytes(array_bytes(ref)))
        return placed

    def ask_in_vain(self, request: EngineRequest | PrimeTemplate) -> None:
        """Send a request that no engine can decode."""
        members = msgspec.msgpack.decode(msgspec.msgpack.encode(request)) | {"priority": "none"}
        self.server.send(with_body(self._ends[0].seal(request), msgspec.msgpack.encode(members)))

    def answer(self, *outputs: Finished | PartialImage | Failed | Aborted | TemplatePrimed) -> None:
        load = LoadReport(num_received=1, num_running=0, num_waiting=0)
        self.say(EngineOutputs(outputs=outputs, load=load))

    def say(self, message: FromEngine) -> None:
        """Have the engine send a message."""
        self.host.send(self._ends[1].seal(message))


def fill(arena: Arena, ref: ArrayRef, content: bytes) -> None:
    arena.view(ref).reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8)


def content(arena: Arena, ref: ArrayRef) -> bytes:
    return arena.view(ref).tobytes()


def finished(request_id: str) -> Finished:
    return Finished(request_id, {}, 3, False, "off", None, False, 0, 0.0)


@contextmanager
def closing(way: Way) -> Iterator[Way]:
    try:
        yield way
    finally:
        for arena in way.arenas:
            arena.close()


def at(offset: int, shape: tuple[int, ...], dtype: str = "uint8") -> ArrayRef:
    return ArrayRef(0, offset, shape, dtype)


def requests() -> dict[str, EngineRequest | PrimeTemplate]:
    edit = with_spec(
        make_edit("edit"),
        template=at(1, (256, 256, 3)),
        mask=at(2, (256, 256)),
        active=at(4, (64,), "int32"),
        references=(at(8, (32, 32, 3)), at(9, (16, 16, 3))),
        inputs={"style": at(12, (7,), "float32")},
        outputs={"picture": Artefact(at(16, (256, 256, 3))), "other": Artefact(at(17, (100,)), "value")},
        previews=(Artefact(at(32, (64, 64, 3))), Artefact(at(33, (64, 64, 3)))),
        state=at(64, (16, 4), "float32"),
        kept_states={2: at(128, (16, 4), "float32")},
    )
    hires = with_spec(
        make_hires_edit("hires"),
        template=at(5, (256, 256, 3)),
        mask=at(6, (256, 256)),
        active=at(8, (256,), "int32"),
        outputs={"picture": Artefact(at(7, (256, 256, 3)))},
        canvases={
            "first": msgspec.structs.replace(
                make_hires_edit("").picture.canvases["first"], active=at(12, (64,), "int32"), control_pictures=()
            )
        },
    )
    search = with_spec(
        make_selecting_edit("search"),
        template=at(5, (256, 256, 3)),
        mask=at(6, (256, 256)),
        active=at(4096, (50,), "int32"),
        outputs={"picture": Artefact(at(7, (256, 256, 3)))},
    )
    prime = PrimeTemplate("prime", "m", at(1, (1024, 1024, 3)), 1024, 1024, "content", 4096, 0.0)
    return {each.request_id: each for each in (edit, hires, search, prime)}


@pytest.mark.parametrize("loss", [0.0, 0.02])
@pytest.mark.parametrize("name", ["edit", "hires", "search", "prime"])
async def test_arrays_are_where_they_belong(name: str, loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BEAT_SECONDS", 0.005)
    monkeypatch.setattr(connection, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(connection, "WINDOW_BYTES", 50_000)
    with closing(Way(seed=3, loss=loss)) as way:
        running = asyncio.create_task(way.run())
        sent = way.ask(requests()[name])
        async with asyncio.timeout(20):
            while name not in way.requests:
                await asyncio.sleep(0)
        there = way.requests[name]
        if name == "prime":
            assert way.server.byte_seconds != Pace().byte_seconds, "it was measured"
        pairs = zip(arrays_read(sent), arrays_read(there), strict=True)
        assert all(content(way.server_arena, mine) == content(way.host_arena, its) for mine, its in pairs)
        made = {ref.offset: random.Random(ref.offset).randbytes(array_bytes(ref)) for ref in arrays_written(there)}
        for ref in arrays_written(there):
            fill(way.host_arena, ref, made[ref.offset])
        partials = [PartialImage(name, 0, 1), PartialImage(name, 1, 2)] if name == "edit" else []
        for partial in partials:
            way.answer(partial)
        way.answer(TemplatePrimed(name, 1, 1.0) if name == "prime" else finished(name))
        async with asyncio.timeout(20):
            while len(way.told) < len(partials) + 1:
                await asyncio.sleep(0)
            for mine, its in zip(arrays_written(sent), arrays_written(there), strict=True):
                assert content(way.server_arena, mine) == made[its.offset]
            while way.host_bytes or not (way.host.is_flushed and way.server.is_flushed):
                await asyncio.sleep(0)
        running.cancel()


@pytest.mark.parametrize("output", [Aborted("edit"), Failed("edit", Failure.of(EngineError("no")))])
async def test_a_request_that_ends_otherwise_leaves_nothing(output: Aborted | Failed) -> None:
    with closing(Way(seed=1, loss=0.0)) as way:
        running = asyncio.create_task(way.run())
        way.ask(requests()["edit"])
        async with asyncio.timeout(20):
            while "edit" not in way.requests:
                await asyncio.sleep(0)
            way.answer(output)
            while not way.told or way.host_bytes:
                await asyncio.sleep(0)
        running.cancel()


@asynccontextmanager
async def running(way: Way) -> AsyncIterator[None]:
    """Messages pass meanwhile, for at most 20 s. What a courier raises is raised."""
    with closing(way):
        task = asyncio.create_task(way.run())
        try:
            async with asyncio.timeout(20):
                yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_arrays_that_nobody_asked_for_are_refused() -> None:
    with closing(Way(seed=1, loss=0.0)) as way:
        placed = way.ask(requests()["edit"])
        picture = next(iter(arrays_written(placed)))
        size = array_bytes(picture)
        assert len(way.server.place("edit", picture.offset, size)) == size
        for name, offset, total in (
            ("ended", picture.offset, size),
            ("edit", picture.offset, size - 1),
            ("edit", 1, size),
        ):
            with pytest.raises(MessageError, match="does not ask for"):
                way.server.place(name, offset, total)


@pytest.mark.parametrize("total", [0, -1])
async def test_arrays_that_no_request_can_have_are_refused(total: int) -> None:
    """Whatever comes ends the engine's host in order, and is no bug of its own."""
    with closing(Way(seed=1, loss=0.0)) as way, pytest.raises(MessageError, match="which 'edit' cannot have"):
        way.host.place("edit", 64, total)


@pytest.mark.parametrize("last", ["terminal", "engine failed"])
async def test_memory_of_requests_that_have_ended_is_not_written(last: str) -> None:
    way = Way(seed=1, loss=0.0)
    async with running(way):
        placed = way.ask(requests()["edit"])
        await until(lambda: "edit" in way.requests)
        if last == "terminal":
            way.answer(Aborted("edit"))
        else:
            way.say(EngineFailed(failure=Failure.of(EngineError("no"))))
        await until(lambda: way.told)
        for picture in arrays_written(placed):
            with pytest.raises(MessageError, match="does not ask for"):
                way.server.place("edit", picture.offset, array_bytes(picture))


@pytest.mark.parametrize("output", [finished("other"), PartialImage("other", 0, 1)])
async def test_outputs_of_what_does_not_run_there_are_refused(output: Finished | PartialImage) -> None:
    way = Way(seed=1, loss=0.0)
    with closing(way):
        way.answer(output)
        refused = pytest.RaisesExc(MessageError, match="'other', which does not run there")
        with pytest.RaisesGroup(refused, flatten_subgroups=True):
            async with asyncio.timeout(20):
                await way.run()
    assert not way.told


async def test_a_request_that_cannot_be_decoded_is_the_engines_to_refuse() -> None:
    way = Way(seed=1, loss=0.0)
    async with running(way):
        way.ask_in_vain(way.placed(requests()["edit"]))
        way.ask(requests()["prime"])
        await until(lambda: "prime" in way.requests)
        assert len(way.refused) == 1
        way.answer(Failed("edit", Failure.of(MessageError("no"))), TemplatePrimed("prime", 1, 1.0))
        await until(lambda: way.told and not way.host_bytes)


async def test_a_request_comes_again_while_the_arrays_of_another_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers of an engine may die, and start again: what it had is sent to it again."""
    monkeypatch.setattr(connection, "BEAT_SECONDS", 0.005)
    monkeypatch.setattr(connection, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(connection, "WINDOW_BYTES", 2000)
    way = Way(seed=1, loss=0.0)
    async with running(way):
        for name in ("edit", "search"):
            way.ask(requests()[name])
            await until(lambda name=name: name in way.requests)
        way.answer(Failed("search", Failure.of(EngineDeadError("its worker died"))))
        way.answer(finished("edit"))  # its picture is sent before the memory of the next ones is freed
        way.answer()
        await until(lambda: way.told)
        del way.requests["search"]
        sent = way.ask(requests()["search"])
        await until(lambda: "search" in way.requests and len(way.told) == 3)
        pairs = zip(arrays_read(sent), arrays_read(way.requests["search"]), strict=True)
        assert all(content(way.server_arena, mine) == content(way.host_arena, its) for mine, its in pairs)
        way.answer(finished("search"))
        await until(lambda: len(way.told) == 4 and not way.host_bytes)


async def test_no_room_for_an_array() -> None:
    way = Way(seed=1, loss=0.0, host_bytes=4096)
    with closing(way):
        way.ask(requests()["edit"])
        with pytest.RaisesGroup(pytest.RaisesExc(OutOfMemoryError, match="no room"), flatten_subgroups=True):
            async with asyncio.timeout(20):
                await way.run()


async def test_an_end_that_is_never_heard_is_silent() -> None:
    silent = asyncio.Event()
    with contextlib.closing(Arena.create(0, 4096)) as arena:
        courier = HostCourier(EPOCH, "10.0.0.2", Ends(arena, lambda *_: None, lambda _: None, silent.set, 0.04))
        task = asyncio.create_task(courier.run())
        await asyncio.wait_for(silent.wait(), 20)
        task.cancel()


async def test_an_engine_that_cannot_start_says_on_which_machine() -> None:
    with closing(Way(seed=1, loss=0.0)) as way:
        running = asyncio.create_task(way.run())
        way.say(EngineFailed(failure=Failure.of(ConfigError("there is no model /m"))))
        async with asyncio.timeout(20):
            while not way.told:
                await asyncio.sleep(0)
        running.cancel()
        (failed,) = way.told
        assert isinstance(failed, EngineFailed)
        assert failed.failure.message == "10.0.0.2: there is no model /m"

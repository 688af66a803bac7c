"""Both ends of the way to an engine of another machine: what requests read and make is where it belongs, whatever is
lost between them, and nothing is kept afterwards.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from fakes import make_edit, make_hires_edit, make_selecting_edit, with_spec

from core.costs.load_report import LoadReport
from core.errors import ConfigError, EngineError
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
from core.messages.envelope import Envelopes
from engine.cluster import connection
from engine.cluster.host_courier import HostCourier
from engine.cluster.link import Frames
from engine.cluster.request_arrays import arrays_read, arrays_written, moved
from engine.cluster.server_courier import ServerCourier

EPOCH = 2**64 - 7
ARENA_BYTES = 1 << 24


class Way:
    """Both couriers, and where an engine would be. Each message between them is lost with a probability, and with it
    all that is under way there."""

    def __init__(self, seed: int, loss: float) -> None:
        self._random, self._loss = random.Random(seed), loss
        self.arenas = Arena.create(0, ARENA_BYTES), Arena.create(0, ARENA_BYTES)
        self.server_arena, self.host_arena = self.arenas
        self.memory = ArenaAllocator(self.server_arena)
        self._to_host: deque[tuple[bytes, list[bytes]]] = deque()
        self._to_server: deque[tuple[bytes, list[bytes]]] = deque()
        self._ends = Envelopes(EPOCH), Envelopes(EPOCH)  # of the API server and of the engine
        self.told: list[FromEngine] = []
        self.requests: dict[str, EngineRequest | PrimeTemplate] = {}  # that the engine has, with arrays of its machine
        self.server = ServerCourier(
            EPOCH, self.server_arena, self._sender(self._to_host), self._on_told, self._fail, silence_seconds=60
        )
        self.host = HostCourier(
            EPOCH,
            "10.0.0.2",
            self.host_arena,
            self._sender(self._to_server),
            self._on_request,
            self._fail,
            silence_seconds=60,
        )

    def _fail(self) -> None:
        raise AssertionError("nobody was silent")

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
        message = decoder.decode(opened.body)
        assert isinstance(message, EngineRequest | PrimeTemplate)
        self.requests[message.request_id] = message

    def ask(self, request: EngineRequest | PrimeTemplate) -> EngineRequest | PrimeTemplate:
        """Send a request with arrays of random content; the request as it was sent."""
        offsets: dict[int, int] = {}
        for ref in [*arrays_read(request), *arrays_written(request)]:
            offsets[ref.offset] = self.memory.alloc(array_bytes(ref)).offset
        placed = moved(request, offsets)
        for ref in arrays_read(placed):
            fill(self.server_arena, ref, self._random.randbytes(array_bytes(ref)))
        self.server.send(self._ends[0].seal(placed))
        return placed

    def answer(self, *outputs: Finished | PartialImage | Failed | Aborted | TemplatePrimed) -> None:
        load = LoadReport(num_received=1, num_running=0, num_waiting=0)
        self.host.send(self._ends[1].seal(EngineOutputs(outputs=outputs, load=load)))


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
            while way.host.used_bytes or not (way.host.is_flushed and way.server.is_flushed):
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
            while not way.told or way.host.used_bytes:
                await asyncio.sleep(0)
        running.cancel()


async def test_what_comes_after_a_request_has_ended_is_not_written() -> None:
    with closing(Way(seed=1, loss=0.0)) as way:
        assert way.server.place("ended", 64, 10) is None
        placed = way.ask(requests()["edit"])
        picture = next(iter(arrays_written(placed)))
        assert way.server.place("edit", picture.offset, array_bytes(picture) - 1) is None
        assert way.server.place("edit", picture.offset + 64, array_bytes(picture)) is None
        assert way.server.place("edit", picture.offset, array_bytes(picture)) is not None


async def test_an_engine_that_cannot_start_says_on_which_machine() -> None:
    with closing(Way(seed=1, loss=0.0)) as way:
        running = asyncio.create_task(way.run())
        way.host.send(way._ends[1].seal(EngineFailed(failure=Failure.of(ConfigError("there is no model /m")))))
        async with asyncio.timeout(20):
            while not way.told:
                await asyncio.sleep(0)
        running.cancel()
        (failed,) = way.told
        assert isinstance(failed, EngineFailed)
        assert failed.failure.message == "10.0.0.2: there is no model /m"

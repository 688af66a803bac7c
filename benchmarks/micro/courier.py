"""What the way to an engine of another machine costs, with engines that answer at once, one as on another machine
(ChildHost) and one as on this one. Requests are edits of 1024 x 1024 px, whose arrays are 4.2 MB, the picture's 3.1.

`alone`: one edit at a time, at the two engines in turns. `stream`: edits at a rate, beside which a timer shows how late
the event loop is that an API server shares with its couriers; and as many edits as go through.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop

from benchmarks.command import command
from benchmarks.load import instant_engine
from benchmarks.load.child_host import ChildHost
from benchmarks.report import Row, Value, percentile, print_report
from benchmarks.simulation.machine import IMAGE_TOKENS
from benchmarks.simulation.scenario import edit_of
from core.config import EngineConfig, ModelConfig
from core.handles import ArrayRef
from core.ipc.shared_array import Arena, ArenaAllocator, array_bytes
from core.messages.engine import EngineRequest, Finished, Output
from core.messages.request_arrays import arrays_read, arrays_written, copied, moved
from core.messages.specs import EditSpec
from engine.cluster.pace import EXPECTED_BYTES_PER_SECOND
from engine.cluster.remote_backend import RemoteBackend
from engine.router import local_backend
from engine.router.engine_backend import EngineBackend
from engine.router.engine_client import EngineClient

CONFIG = EngineConfig(models=(ModelConfig(device="cuda"),))  # whose workers no launcher forks
ARENA_BYTES = 1 << 30
ACTIVE_SHARE = 0.25
WARM_UPS = 10
PAUSE_SECONDS = 0.01
"""Between two edits alone."""

TICK_SECONDS = 0.002
"""The timer beside a stream fires this often."""

MOST = 16
"""Edits of a stream at a time."""

LATENCY_BAR = 0.005
"""Seconds that a lone edit may take longer, beside its bytes at EXPECTED_BYTES_PER_SECOND."""


@dataclass
class Load:
    """What a stream has met, in seconds. lateness: of the timer."""

    latencies: list[float] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Place:
    """An engine, and the edits that it makes."""

    def __init__(self, arena: Arena, allocator: ArenaAllocator, client: EngineClient) -> None:
        """client: of an engine that serves."""
        self._arena, self._allocator, self._client = arena, allocator, client
        self._edit = example()
        self._number = 0

    async def edit(self) -> float:
        """Seconds from the message to its answer."""
        refs = [*arrays_read(self._edit), *arrays_written(self._edit)]
        places = {ref.offset: self._allocator.alloc(array_bytes(ref)) for ref in refs}
        self._number += 1
        request = moved(self._edit, {offset: place.offset for offset, place in places.items()})
        request = msgspec.structs.replace(request, request_id=str(self._number))
        for ref in arrays_read(request):
            self._arena.view(ref)[:] = 1
        answer: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self._client.submit(request, answer.set_result)
        output = await answer
        seconds = time.perf_counter() - start
        assert isinstance(output, Finished), output
        for place in places.values():
            self._allocator.free(place)
        return seconds


def example() -> EngineRequest:
    """An edit, each of whose arrays has an offset of its own."""
    edit = edit_of(0, 0.0, int(ACTIVE_SHARE * IMAGE_TOKENS), steps=28, template=0)
    spec = edit.spec
    assert isinstance(spec, EditSpec)

    def at(number: int, ref: ArrayRef) -> ArrayRef:
        return msgspec.structs.replace(ref, offset=64 * number)

    spec = msgspec.structs.replace(
        spec, template=at(1, spec.template), mask=at(2, spec.mask), active=at(3, spec.active)
    )
    return msgspec.structs.replace(edit, model=CONFIG.models[0].name, spec=spec)


@asynccontextmanager
async def places() -> AsyncIterator[Mapping[str, Place]]:
    """An engine of this machine and one as of another one, which serve."""
    async with AsyncExitStack() as stack:
        arena = Arena.create(0, ARENA_BYTES)
        stack.callback(arena.close)
        allocator = ArenaAllocator(arena)
        backends: dict[str, EngineBackend] = {
            "here": local_backend.LocalBackend(arena),
            "there": RemoteBackend(arena, ChildHost),
        }
        clients = {name: await _serving(stack, backend) for name, backend in backends.items()}
        yield {name: Place(arena, allocator, client) for name, client in clients.items()}


async def _serving(stack: AsyncExitStack, backend: EngineBackend) -> EngineClient:
    client = EngineClient(CONFIG, backend, lambda models, nbytes: None, lambda load, stats: None, 60.0)
    client.start()
    running = asyncio.create_task(client.run())
    stack.callback(running.cancel)
    stack.push_async_callback(client.close)
    stack.push_async_callback(client.stop)
    await client.ready()
    return client


async def alone(places: Mapping[str, Place], rounds: int) -> dict[str, list[float]]:
    """Seconds of edits, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in places}
    for number in range(-WARM_UPS, rounds):
        for name, place in places.items():
            taken = await place.edit()
            if number >= 0:
                seconds[name].append(taken)
            await asyncio.sleep(PAUSE_SECONDS)
    return seconds


async def stream(place: Place, rate: float | None, seconds: float) -> Load:
    """Edits at a rate, MOST of them at a time; None: as many as go through."""
    load, slots = Load(), asyncio.Semaphore(MOST)
    ticking = asyncio.create_task(_tick(load.lateness))

    async def one() -> None:
        load.latencies.append(await place.edit())
        slots.release()

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        number = 0
        while (now := time.perf_counter()) < start + seconds:
            if rate is not None and now < start + number / rate:
                await asyncio.sleep(start + number / rate - now)
            await slots.acquire()
            tasks.create_task(one())
            number += 1
    load.seconds = time.perf_counter() - start
    ticking.cancel()
    with suppress(asyncio.CancelledError):
        await ticking
    return load


async def _tick(lateness: list[float]) -> None:
    while True:
        due = time.perf_counter() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lateness.append(time.perf_counter() - due)


async def measure(rounds: int, megabytes: float, seconds: float, output: Path | None) -> None:
    nbytes = sum(copied(example()))
    async with places() as found:
        lone = await alone(found, rounds)
        streams = {
            (name, rate): await stream(place, rate, seconds)
            for rate in (1.0, megabytes * 1e6 / nbytes, None)
            for name, place in found.items()
        }
    added = statistics.median(there - here for here, there in zip(lone["here"], lone["there"], strict=True))
    allowed = LATENCY_BAR + nbytes / EXPECTED_BYTES_PER_SECOND
    rows: list[Row] = [
        (f"alone, {name}", f"median {1e3 * statistics.median(each):.1f} ms, P90 {1e3 * percentile(each, 0.9):.1f} ms")
        for name, each in lone.items()
    ]
    rows.append(("there longer by", f"median {1e3 * added:.1f} ms, allowed {1e3 * allowed:.1f} ms"))
    result: dict[str, Value] = {"benchmark": "courier", "megabytes": nbytes / 1e6, "rounds": rounds}
    result |= {"added_ms": 1e3 * added, "allowed_ms": 1e3 * allowed}
    for (name, rate), load in streams.items():
        speed = nbytes * len(load.latencies) / load.seconds / 1e6
        p50, p99, most = (1e3 * percentile(load.lateness, share) for share in (0.5, 0.99, 1.0))
        median = 1e3 * statistics.median(load.latencies)
        asked = "all" if rate is None else f"{rate * nbytes / 1e6:.0f}"
        late = f"timer late by {p50:.1f} ms, P99 {p99:.1f}, at most {most:.1f}"
        rows.append((f"{asked} MB/s, {name}", f"{speed:.0f} MB/s, median {median:.1f} ms; {late}"))
        result |= {f"{name}_{asked}_mbps": speed, f"{name}_{asked}_late_p99_ms": p99}
    print_report(f"an edit's {nbytes / 1e6:.1f} MB to an engine here and there", rows, result, output)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command(__doc__, rounds=100)
    parser.add_argument("--megabytes", type=float, default=100.0, help="of arrays in a second of the stream")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each stream")
    args = parser.parse_args(argv)
    local_backend.ENTRY = instant_engine.ENTRY
    uvloop.run(measure(args.rounds, args.megabytes, args.seconds, args.output))


if __name__ == "__main__":
    main()

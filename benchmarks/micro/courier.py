"""What the way to an engine of another machine costs: engines that answer at once, on this machine and as on another
one (ChildHost), whose requests are edits of 1024 x 1024 px: 4.2 MB there, the picture's 3.1 MB back.

`alone`: one request at a time, in turns. `stream`: requests at a rate, beside which a timer shows how late the event
loop is that the API server shares with its couriers; and as many as go through.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import msgspec
import psutil
import uvloop

from benchmarks.command import command
from benchmarks.load import instant_engine
from benchmarks.load.child_host import ChildHost
from benchmarks.report import percentile, print_report
from benchmarks.simulation.scenario import IMAGE_TOKENS, edit_of
from core.config import EngineConfig, ModelConfig
from core.ipc.shared_array import Arena, ArenaAllocator, array_bytes
from core.messages.engine import EngineRequest, Failed, Finished
from engine.cluster.remote_backend import RemoteBackend
from core.messages.request_arrays import arrays_read, arrays_written, moved
from engine.router import local_backend
from engine.router.engine_backend import EngineBackend
from engine.router.engine_client import EngineClient, RequestOutput

ARENA_BYTES = 1 << 30
ACTIVE_SHARE = 0.25
TICK_SECONDS = 0.002
PLACES = ("local", "remote")
PROMISED_SECONDS, PROMISED_BYTES_PER_SECOND = 0.005, 0.3e9


@dataclass
class Load:
    """What a stream has met: seconds of its requests, how late the loop's timer was, and CPU seconds of this process."""

    latencies: list[float] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


class Place:
    """An engine, and the edits that are sent there."""

    def __init__(self, arena: Arena, allocator: ArenaAllocator, backend: EngineBackend) -> None:
        self._allocator = allocator
        config = EngineConfig(models=(ModelConfig(device="cuda"),))  # whose workers no launcher forks
        self._client = EngineClient(config, backend, lambda models, _: None, lambda load, stats: None, 60.0)
        self._number = 0
        edit = edit_of(0, 0.0, int(ACTIVE_SHARE * IMAGE_TOKENS), 28, 0)
        self._edit = msgspec.structs.replace(edit, model=config.models[0].name)
        refs = [*arrays_read(_apart(self._edit)), *arrays_written(_apart(self._edit))]
        self.sizes = {ref.offset: array_bytes(ref) for ref in refs}
        self._arena = arena

    async def start(self) -> asyncio.Task[None]:
        """Its connection's task, once it serves."""
        self._client.start()
        running = asyncio.create_task(self._client.run())
        await self._client.ready()
        return running

    async def close(self) -> None:
        await self._client.stop()
        await self._client.close()

    async def edit(self) -> float:
        """Seconds from the message to the answer."""
        refs = {offset: self._allocator.alloc(size) for offset, size in self.sizes.items()}
        request = moved(_apart(self._edit), {offset: ref.offset for offset, ref in refs.items()})
        for ref in arrays_read(request):
            self._arena.view(ref)[:] = 1
        self._number += 1
        answer: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self._client.submit(msgspec.structs.replace(request, request_id=str(self._number)), answer.set_result)
        output = await answer
        seconds = time.perf_counter() - start
        for ref in refs.values():
            self._allocator.free(ref)
        if isinstance(output, Failed):
            raise output.failure.to_error()
        assert isinstance(output, Finished)
        return seconds


def _apart(edit: EngineRequest) -> EngineRequest:
    """The edit with a number of its own as each array's offset."""
    spec = edit.spec
    refs = {"template": spec.template, "mask": spec.mask, "active": spec.active}  # type: ignore[union-attr]
    changes = {
        name: msgspec.structs.replace(ref, offset=64 * number)
        for number, (name, ref) in enumerate(refs.items(), start=1)
    }
    return msgspec.structs.replace(edit, spec=msgspec.structs.replace(spec, **changes))


async def stream(place: Place, rate: float | None, seconds: float, most: int) -> Load:
    """Send edits at a rate, None: `most` at a time, as many as go through."""
    load, slots, process = Load(), asyncio.Semaphore(most), psutil.Process()
    ticking = asyncio.create_task(_tick(load.lateness))
    before, start = sum(process.cpu_times()[:2]), time.perf_counter()

    async def one() -> None:
        try:
            load.latencies.append(await place.edit())
        finally:
            slots.release()

    async with asyncio.TaskGroup() as tasks:
        number = 0
        while (now := time.perf_counter()) < start + seconds:
            if rate is not None and now < start + number / rate:
                await asyncio.sleep(start + number / rate - now)
            await slots.acquire()
            tasks.create_task(one())
            number += 1
    load.seconds = time.perf_counter() - start
    load.cpu_seconds = sum(process.cpu_times()[:2]) - before
    ticking.cancel()
    with suppress(asyncio.CancelledError):
        await ticking
    return load


async def _tick(lateness: list[float]) -> None:
    while True:
        due = time.perf_counter() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lateness.append(time.perf_counter() - due)


async def measure(args_rounds: int, rate: float, seconds: float) -> None:
    async with AsyncExitStack() as stack:
        arena = Arena.create(0, ARENA_BYTES)
        allocator = ArenaAllocator(arena)
        backends: dict[str, EngineBackend] = {
            "local": local_backend.LocalBackend(arena),
            "remote": RemoteBackend(arena, ChildHost),
        }
        places = {}
        for name, backend in backends.items():
            places[name] = Place(arena, allocator, backend)
            running = await places[name].start()
            stack.callback(running.cancel)
            stack.push_async_callback(places[name].close)
        alone = defaultdict[str, list[float]](list)
        for number in range(args_rounds + 5):
            for name in PLACES:
                taken = await places[name].edit()
                if number >= 5:
                    alone[name].append(taken)
                await asyncio.sleep(0.01)
        nbytes = sum(places["remote"].sizes.values())
        for name in PLACES:
            ms = [1e3 * each for each in alone[name]]
            print(name, f"median {statistics.median(ms):.2f} p90 {percentile(ms, 0.9):.2f} max {max(ms):.2f}")
        added = statistics.median(b - a for a, b in zip(alone["local"], alone["remote"], strict=True))
        allowed = PROMISED_SECONDS + nbytes / PROMISED_BYTES_PER_SECOND
        print(f"added {1e3 * added:.2f} ms of {1e3 * allowed:.2f} for {nbytes / 1e6:.1f} MB")
        for name in PLACES:
            for each in (0.5, rate, None):
                load = await stream(places[name], each, seconds, 16)
                late = [1e3 * x for x in load.lateness]
                lat = [1e3 * x for x in load.latencies]
                mbs = nbytes * len(lat) / load.seconds / 1e6
                print(
                    name,
                    each,
                    f"{mbs:.0f} MB/s lat med {statistics.median(lat):.1f} p99 {percentile(lat, 0.99):.1f} | late p50 {statistics.median(late):.2f} p99 {percentile(late, 0.99):.2f} max {max(late):.2f} | cpu {load.cpu_seconds / load.seconds:.2f}",
                )


if __name__ == "__main__":
    local_backend.ENTRY = instant_engine.ENTRY
    import sys

    uvloop.run(measure(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))

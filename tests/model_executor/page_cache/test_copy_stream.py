"""Copies during computation, on a fake GPU that records its calls and copies at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core.errors import ConfigError
from core.handles import EntryRef, Tier
from core.ipc.shared_array import Arena, ArenaAllocator
from core.messages.worker import PageCopied, PageCopy
from model_executor.page_cache import page_store
from model_executor.page_cache.copy_stream import CopyStream
from model_executor.page_cache.page_store import PageStore
from model_executor.page_cache.uploads import BLOCKS_AHEAD

CPU = torch.device("cpu")
BLOCK, NUM_BLOCKS = 4096, 5
NBYTES = NUM_BLOCKS * BLOCK - 100
PATIENCE = 20.0


class Event:
    """is_over: whether it, or its stream, was waited for."""

    def __init__(self, gpu: Gpu, blocking: bool) -> None:
        self.gpu, self.blocking, self.stream, self.is_over = gpu, blocking, "", False

    def record(self, stream: Stream) -> None:
        self.stream = stream.name
        stream.events.append(self)

    def synchronize(self) -> None:
        assert self.blocking, "a thread that waits would spin"
        if self.gpu.gate is not None:
            assert self.gpu.gate.acquire(timeout=PATIENCE)
        self.is_over = True


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name, self.device = gpu, name, CPU
        self.events: list[Event] = []
        self.waited_for: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)

    def synchronize(self) -> None:
        for event in self.events:
            event.is_over = True


class Gpu:
    """The part of `torch.cuda` that is used."""

    def __init__(self) -> None:
        self.computing, self.copying = Stream(self, "computing"), Stream(self, "copying")
        self._current = threading.local()
        self.registered: dict[int, int] = {}  # address -> bytes
        self.register_error = 0
        self.gate: threading.Semaphore | None = None  # copies after which a thread has waited must pass it
        self.devices: dict[str, torch.device] = {}  # thread -> the one it has chosen

    def set_device(self, device: torch.device) -> None:
        assert device.index is not None
        self.devices[threading.current_thread().name] = device

    def Stream(self, device: torch.device) -> Stream:
        self.copying.device = device if device.index is not None else torch.device(device.type, 0)
        return self.copying

    def Event(self, blocking: bool = False) -> Event:
        return Event(self, blocking)

    def current_stream(self, device: torch.device) -> Stream:
        """The current stream of the calling thread."""
        return getattr(self._current, "stream", self.computing)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.stream = stream
        yield
        self._current.stream = self.computing

    def cudart(self) -> Gpu:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes
        return self.register_error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    return gpu


def wait_until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.001)


def content() -> Tensor:
    return torch.randint(0, 256, [NBYTES], dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_a_load_waits_for_earlier_computation_and_later_computation_for_a_load(gpu: Gpu) -> None:
    stream, device = CopyStream(CPU, torch.empty(1)), torch.zeros(NBYTES, dtype=torch.uint8)
    ready: Any = stream.ready()
    stream.follow(ready)
    event: Any = stream.load(content(), device)
    assert torch.equal(device, content())
    assert gpu.copying.waited_for == gpu.computing.events == [ready]
    assert gpu.copying.events == [event]
    assert gpu.current_stream(CPU) is gpu.computing
    stream.wait(event)
    assert gpu.computing.waited_for == [event]


def test_a_copy_down_that_fails_leaves_none_under_way(gpu: Gpu) -> None:
    stream = CopyStream(CPU, torch.empty(1))
    queued: Any = stream.load(content(), content())
    with pytest.raises(RuntimeError, match="must match"):
        stream.store(content(), content()[:9])
    assert queued.is_over


def test_an_arena_that_cannot_be_pinned_is_a_config_error(gpu: Gpu) -> None:
    gpu.register_error = 2
    with pytest.raises(ConfigError, match=r"cannot pin 0.0 GiB .* \(cudaError 2\); give a smaller --cache-host-bytes"):
        CopyStream(CPU, torch.empty(1))


@pytest.mark.parametrize(("name", "chosen"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_the_thread_that_copies_chooses_its_device(gpu: Gpu, name: str, chosen: str) -> None:
    arena = Arena.create(7, 1 << 20)
    store = PageStore(torch.device(name), arena, None, lambda copied: None)
    store.close()
    assert gpu.devices == {"page-io": torch.device(chosen)}
    arena.close()


def test_a_page_store_uses_the_copy_stream(gpu: Gpu) -> None:
    """Down from a tensor that was created in inference mode, and up again; meanwhile the whole arena is registered."""
    arena, done = Arena.create(7, 1 << 20), Queue[PageCopied]()
    store = PageStore(CPU, arena, None, done.put)
    store._stream = CopyStream(CPU, store._whole_arena())
    assert list(gpu.registered.values()) == [1 << 20]
    host, device = ArenaAllocator(arena).alloc(NBYTES), EntryRef("a", NBYTES, None)

    def copy(source: Tier, target: Tier) -> None:
        store.start(PageCopy("a", NBYTES, BLOCK, source, target, host))

    with torch.inference_mode():
        store.create(device).copy_(content())
        copy("device", "host")
    assert done.get(timeout=PATIENCE).ok
    assert np.array_equal(arena.view(host), content().numpy())
    with torch.inference_mode():
        store.forget(["a"])
        copy("host", "device")
        for block in range(NUM_BLOCKS):
            store.wait_block("a", block)
        assert done.get(timeout=PATIENCE).ok
        assert torch.equal(store.entry(device), content())
    assert len(gpu.copying.events) == NUM_BLOCKS
    assert gpu.copying.waited_for == gpu.computing.events  # one for each copy
    store.close()
    assert gpu.registered == {}
    arena.close()


def test_the_entries_of_a_step_come_in_turns_before_others_that_were_ordered_earlier(gpu: Gpu) -> None:
    """Those blocks that the step computes in full come last."""
    arena, done = Arena.create(7, 1 << 20), Queue[PageCopied]()
    store, space = PageStore(CPU, arena, None, done.put), ArenaAllocator(arena)
    store._stream, gpu.gate = CopyStream(CPU, store._whole_arena()), threading.Semaphore(0)
    for key in "abc":
        host = space.alloc(NBYTES)
        torch.from_numpy(arena.view(host)).copy_(content())
        store.start(PageCopy(key, NBYTES, BLOCK, "host", "device", host))
    loads = {key: store._loads[key][0] for key in "abc"}
    wait_until(lambda: len(loads["a"].arrived) == BLOCKS_AHEAD)
    store.put_last("b", {0})
    store.put_last("c", ())
    waiter = threading.Thread(target=store.wait_block, args=("b", 0))
    waiter.start()
    wait_until(lambda: loads["c"].is_awaited)
    gpu.gate.release(3 * NUM_BLOCKS)
    waiter.join(PATIENCE)
    assert {done.get(timeout=PATIENCE).key for _ in "abc"} == set("abc")
    names: dict[Any, str] = {event: f"{key}{n}" for key in "abc" for n, event in loads[key].events.items()}
    overtaken, turns = (
        [f"a{n}" for n in range(NUM_BLOCKS)],
        ["b1", "c0", "b2", "c1", "b3", "c2", "b4", "c3", "b0", "c4"],
    )
    assert [names[event] for event in gpu.copying.events] == [
        *overtaken[:BLOCKS_AHEAD],
        *turns,
        *overtaken[BLOCKS_AHEAD:],
    ]
    assert all(torch.equal(store.entry(EntryRef(key, NBYTES, None)), content()) for key in "abc")
    store.close()
    arena.close()


def test_loads_overtake_copies_down_of_other_entries_alone(gpu: Gpu) -> None:
    arena, done = Arena.create(7, 1 << 20), Queue[PageCopied]()
    store, space = PageStore(CPU, arena, None, done.put), ArenaAllocator(arena)
    store._stream, gpu.gate = CopyStream(CPU, store._whole_arena()), threading.Semaphore(0)
    hosts = {key: space.alloc(NBYTES) for key in "abc"}
    store.start(PageCopy("a", NBYTES, BLOCK, "host", "device", hosts["a"]))
    load = store._loads["a"][0]
    wait_until(lambda: len(load.arrived) == BLOCKS_AHEAD)  # then the thread waits at the gate
    for key in "bc":
        store.create(EntryRef(key, NBYTES, None)).zero_()
        store.start(PageCopy(key, NBYTES, BLOCK, "device", "host", hosts[key]))
    for key in "ba":
        store.start(PageCopy(key, NBYTES, BLOCK, "host", "device", hosts[key]))
    gpu.gate.release(3 * NUM_BLOCKS)
    ended = [done.get(timeout=PATIENCE) for _ in range(5)]
    assert [copied.key for copied in ended] == ["a", "a", "b", "b", "c"]
    assert [copied.target for copied in ended] == ["device", "device", "host", "device", "host"]
    store.close()
    arena.close()


def test_copies_down_have_their_turn_between_loads_but_after_those_that_a_step_waits_for(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an entry that is being loaded comes after its load, whoever's turn it is."""
    monkeypatch.setattr(page_store, "BLOCKS_BEFORE_OTHERS", before_others := 2 * NUM_BLOCKS - 2)
    arena, done = Arena.create(7, 1 << 20), Queue[PageCopied]()
    store, space = PageStore(CPU, arena, None, done.put), ArenaAllocator(arena)
    store._stream, gpu.gate = CopyStream(CPU, store._whole_arena()), threading.Semaphore(0)
    loads, downs = ["first", *(f"load{n}" for n in range(6))], ["down0", "load2", "down1"]
    hosts = {key: space.alloc(NBYTES) for key in {*loads, *downs, "step"}}

    def start(key: str, source: Tier, target: Tier) -> None:
        store.start(PageCopy(key, NBYTES, BLOCK, source, target, hosts[key]))

    start("first", "host", "device")
    wait_until(lambda: len(store._loads["first"][0].arrived) == BLOCKS_AHEAD)  # then the thread waits at the gate
    for key in loads[1:]:
        start(key, "host", "device")
    for key in downs:
        if key not in loads:
            store.create(EntryRef(key, NBYTES, None)).zero_()
        start(key, "device", "host")
    start("step", "host", "device")
    load = store._loads["step"][0]
    gpu.gate.release(before_others - BLOCKS_AHEAD)
    wait_until(lambda: len(store._loads["load0"][0].arrived) == before_others - NUM_BLOCKS)  # the last before `down0`
    waiter = threading.Thread(target=store.wait_block, args=("step", 0))
    waiter.start()
    wait_until(lambda: load.is_awaited)
    gpu.gate.release(9 * NUM_BLOCKS)
    ended = [done.get(timeout=PATIENCE) for _ in range(11)]
    order = [copied.key if copied.target == "device" else f"{copied.key} down" for copied in ended]
    assert order == [
        *("first", "step", "down0 down", "load0", "load1", "load2", "load2 down"),
        *("load3", "load4", "down1 down", "load5"),
    ]
    assert all(copied.ok for copied in ended)
    waiter.join(PATIENCE)
    store.close()
    arena.close()


def test_what_a_failed_step_had_announced_does_not_come_with_the_next_one(gpu: Gpu) -> None:
    arena, done = Arena.create(7, 1 << 20), Queue[PageCopied]()
    store, space = PageStore(CPU, arena, None, done.put), ArenaAllocator(arena)
    store._stream, gpu.gate = CopyStream(CPU, store._whole_arena()), threading.Semaphore(0)
    for key in "ab":
        store.start(PageCopy(key, NBYTES, BLOCK, "host", "device", space.alloc(NBYTES)))
    loads = {key: store._loads[key][0] for key in "ab"}
    for key in "ab":
        store.begin_step()
        store.put_last(key, ())  # the step that reads `a` fails before it waits
    gpu.gate.release(2 * NUM_BLOCKS)
    store.wait_block("b", 0)
    assert [loads[key].is_awaited for key in "ab"] == [False, True]
    store.close()
    arena.close()


def test_a_load_that_finds_no_device_memory_or_follows_a_failed_one_fails_alone(gpu: Gpu) -> None:
    arena, done = Arena.create(7, 1 << 20), Queue[PageCopied]()
    store, space = PageStore(CPU, arena, None, done.put), ArenaAllocator(arena)
    store._stream = CopyStream(CPU, store._whole_arena())
    host = space.alloc(NBYTES)
    store.start(PageCopy("large", 1 << 60, BLOCK, "host", "device", host))
    store.start(PageCopy("lost", NBYTES, BLOCK, "disk", "host", host))
    store.start(PageCopy("lost", NBYTES, BLOCK, "host", "device", host))
    store.start(PageCopy("fine", NBYTES, BLOCK, "host", "device", host))
    ended = [done.get(timeout=PATIENCE) for _ in range(4)]
    of_each = {key: [copied.ok for copied in ended if copied.key == key] for key in ("large", "lost", "fine")}
    assert of_each == {"large": [False], "lost": [False, False], "fine": [True]}
    store.close()
    arena.close()

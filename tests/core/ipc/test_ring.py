"""Rings and channels: against a model of a ring, and between two real processes under load in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator

import ipc_children
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from core.ipc.process import ChildProcess, spawn
from core.ipc.ring import Channel, ChannelFullError, PeerClosedError, Ring

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        yield runner


def make_ring(capacity: int) -> Ring:
    return Ring(memoryview(bytearray(Ring.nbytes(capacity))))


def pair(capacity: int = 1024 * 1024) -> tuple[Channel, Channel]:
    """Both ends in this process."""
    here, fds = Channel.create(capacity)
    there = Channel.attach(*fds)
    return here, there


def child_with(target: str, config: bytes = b"") -> tuple[Channel, ChildProcess]:
    channel, fds = Channel.create()
    return channel, spawn(f"{ipc_children.__name__}:{target}", config, fds, target)


def frames(seed: int, count: int) -> Iterator[bytes]:
    """`count` frames of mixed sizes with random content, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.randbytes(rng.choice((0, 1, 7, 8, 9, 300, 5000, rng.randrange(200_000))))


@given(
    capacity=st.integers(1, 12).map(lambda n: 8 * n),
    actions=st.lists(st.one_of(st.none(), st.binary(max_size=100)), max_size=200),
)
def test_ring_against_a_model(capacity: int, actions: list[bytes | None]) -> None:
    """Bytes push a frame, None pops one. The model: a deque, with the room that its frames take."""
    ring, model, taken = make_ring(capacity), deque[bytes](), 0
    for payload in actions:
        if payload is None:
            expected = model.popleft() if model else None
            assert ring.pop() == expected
            taken -= 0 if expected is None else size_of(expected)
        elif size_of(payload) > capacity:
            with pytest.raises(ValueError, match="does not fit"):
                ring.push(payload)
        else:
            fits = taken + size_of(payload) <= capacity
            assert ring.push(payload) == fits
            if fits:
                model.append(payload)
                taken += size_of(payload)
    assert list(iter(ring.pop, None)) == list(model)


def size_of(payload: bytes) -> int:
    return 8 + (len(payload) + 7) // 8 * 8


@pytest.mark.parametrize("capacity", [0, -8, 12])
def test_ring_capacity_is_checked(capacity: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        Ring.nbytes(capacity)


def test_frames_cross_in_order_and_ends_are_seen() -> None:
    here, there = pair()
    here.send(b"one")
    here.send(b"")
    there.send(b"back")
    assert (there.recv(), there.recv()) == (b"one", b"")
    assert here.recv() == b"back"
    here.send(b"last words")
    here.close()
    here.close()
    assert there.recv() == b"last words"
    with pytest.raises(PeerClosedError):
        there.recv()
    with pytest.raises(PeerClosedError):
        there.send(b"x")
    there.close()
    with pytest.raises(PeerClosedError):
        there.send(b"x")


def test_a_full_channel_raises_and_recovers() -> None:
    here, there = pair(capacity=64)
    with pytest.raises(ValueError, match="does not fit"):
        here.send(bytes(57))
    here.send(bytes(56))
    with pytest.raises(ChannelFullError):
        here.send(b"")
    assert there.recv() == bytes(56)
    here.send(b"again")
    assert there.recv() == b"again"
    here.close()
    there.close()


def test_more_frames_than_the_socket_holds_wake_bytes() -> None:
    here, there = pair()
    for index in range(20_000):  # a socket holds a few hundred
        here.send(index.to_bytes(4, "big"))
    assert [there.recv() for _ in range(20_000)] == [index.to_bytes(4, "big") for index in range(20_000)]
    here.close()
    there.close()


@pytest.mark.parametrize(
    ("target", "config"), [("echo", b""), ("echo_asyncio", b"asyncio"), ("echo_asyncio", b"uvloop")]
)
def test_load_in_both_directions(target: str, config: bytes, runner: asyncio.Runner) -> None:
    """Tens of millions of bytes to a child and back: order and content hold, and nothing is lost or waits for ever."""

    async def main() -> None:
        channel, child = child_with(target, config)
        window = asyncio.Semaphore(4)  # so many of the largest frames always fit

        async def send() -> None:
            for frame in frames(1, 1500):
                await window.acquire()
                channel.send(frame)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(send())
            messages = channel.messages()
            for expected in frames(1, 1500):
                assert await anext(messages) == expected
                window.release()
        channel.close()
        assert await child.wait() == 0

    runner.run(main())


def test_no_wake_up_is_lost_when_the_receiver_sleeps_often() -> None:
    """Single small frames with random pauses on both sides: a lost wake-up would leave both sides asleep."""
    channel, child = child_with("echo")
    rng = random.Random(5)
    watchdog = threading.Timer(30, child.kill)  # turns a hang into a PeerClosedError
    watchdog.start()
    for index in range(20_000):
        channel.send(index.to_bytes(4, "big"))
        for _ in range(rng.randrange(200)):
            pass
        assert channel.recv() == index.to_bytes(4, "big")
    watchdog.cancel()
    channel.close()
    asyncio.run(child.wait())


def test_two_threads_flood_each_other_through_small_rings() -> None:
    """Full and empty all the time, so that wrap, refusal and sleep meet in every combination."""
    here, there = pair(capacity=4096)
    sent = [random.Random(3).randbytes(size % 500) for size in range(20_000)]

    def produce() -> None:
        for payload in sent:
            while True:
                with contextlib.suppress(ChannelFullError):
                    here.send(payload)
                    break
                time.sleep(0)

    producer = threading.Thread(target=produce)
    producer.start()
    assert all(there.recv() == payload for payload in sent)
    producer.join()
    here.close()
    there.close()


def test_a_death_ends_messages_after_the_last_frame(runner: asyncio.Runner) -> None:
    async def main() -> None:
        channel, child = child_with("say_and_die", b"last")
        channel.send(b"never read")  # EOF then comes as ECONNRESET
        async with asyncio.timeout(20):
            assert [frame async for frame in channel.messages()] == [b"last"] * 3
            assert await child.wait() == -9
        with pytest.raises(PeerClosedError):
            channel.send(b"x")
        channel.close()

    runner.run(main())


def test_a_last_frame_and_a_reset_may_come_at_once(runner: asyncio.Runner) -> None:
    async def main() -> None:
        here, there = pair()
        received = asyncio.create_task(collect(here))
        await asyncio.sleep(0.05)  # it waits
        here.send(b"never read")
        there.send(b"last")
        there.close()
        async with asyncio.timeout(20):
            assert await received == [b"last"]
        here.close()

    async def collect(channel: Channel) -> list[bytes]:
        return [frame async for frame in channel.messages()]

    runner.run(main())


def test_a_death_is_seen_by_a_blocking_receiver() -> None:
    channel, child = child_with("say_and_die", b"last")
    assert [channel.recv() for _ in range(3)] == [b"last"] * 3
    with pytest.raises(PeerClosedError):
        channel.recv()
    channel.close()
    asyncio.run(child.wait())


def test_close_ends_a_waiting_iteration(runner: asyncio.Runner) -> None:
    async def main() -> None:
        here, there = pair()
        asyncio.get_running_loop().call_later(0.05, here.close)
        async with asyncio.timeout(5):
            assert [frame async for frame in here.messages()] == []
        there.close()

    runner.run(main())


@pytest.mark.parametrize("peer_gone", [False, True])
def test_a_slow_reader_does_not_spin(runner: asyncio.Runner, peer_gone: bool) -> None:
    """While a frame is processed, wake bytes and EOF that wait in the socket use no CPU (it is level-triggered)."""

    async def main() -> None:
        here, there = pair()
        for _ in range(5):
            there.send(b"x")
        messages = here.messages()
        await anext(messages)
        there.send(b"x")
        if peer_gone:
            there.close()
        before = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - before < 0.1
        await messages.aclose()
        here.close()
        there.close()

    runner.run(main())


def test_iterating_twice_at_a_time_is_refused(runner: asyncio.Runner) -> None:
    async def main() -> None:
        here, there = pair()
        there.send(b"x")
        first = here.messages()
        assert await anext(first) == b"x"
        with pytest.raises(RuntimeError, match="already"):
            await anext(here.messages())
        await first.aclose()
        there.send(b"y")
        assert await anext(here.messages()) == b"y"
        here.close()
        there.close()

    runner.run(main())


def test_child_descriptors_are_closed_once_and_never_someone_elses() -> None:
    channel, fds = Channel.create()
    os.close(fds[1])  # as spawn does
    ours, theirs = socket.socketpair()  # takes the freed number
    assert fds[1] in (ours.fileno(), theirs.fileno())
    channel.close_child_fds()
    channel.close_child_fds()
    os.fstat(fds[1])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])
    ours.close()
    theirs.close()
    channel.close()


def test_closing_leaks_no_descriptor() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(10):
        here, there = pair()
        here.close()
        there.close()
        channel, fds = Channel.create()
        channel.close()
        assert not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds)
    assert count() == before


@pytest.mark.parametrize("target", ["echo", "echo_asyncio"])
def test_round_trip_latency(target: str) -> None:
    """Two wake-ups and four copies. Expected below 100 us; the limit leaves room for a busy machine."""
    channel, child = child_with(target, b"uvloop")
    times = [timed_round_trip(channel) for _ in range(2000)]
    channel.close()
    assert asyncio.run(child.wait()) == 0
    median = statistics.median(times[100:])
    print(f"\nround trip, {target}: median {median * 1e6:.0f} us, p99 {sorted(times)[1980] * 1e6:.0f} us")
    assert median < 500e-6


def timed_round_trip(channel: Channel) -> float:
    start = time.perf_counter()
    channel.send(bytes(300))
    channel.recv()
    return time.perf_counter() - start

"""Two engines on "other machines", shared by the tests: they paint what a local engine paints, whatever happens to
them and to the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import zmq
from fault_kit import EDITS, Told, begin, count, ends, run_each, start, until
from intruders import GREETING_BYTES, listening, meet, replay, say
from remote_hosts import ProcessHost, remote_engines

from engine.client.async_engine import AsyncEngine
from engine.cluster.curve import CurveKeys
from engine.router import engine_replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

Remote = tuple[AsyncEngine, list[ProcessHost]]


@pytest.fixture(scope="module")
def listened() -> set[tuple[str, int]]:
    """At what this process listens before."""
    return listening([psutil.Process()])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remote(tiny_checkpoint: Path, listened: set[tuple[str, int]]) -> AsyncIterator[Remote]:
    """Engines for which each death counts as the first."""
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(engine_replica, "PROVEN_SECONDS", 0.0)
        with remote_engines() as hosts:
            engine = await stack.enter_async_context(start(tiny_checkpoint, 2, hang_seconds=4.0))
        yield engine, hosts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tiny_checkpoint: Path) -> dict[str, Told]:
    """What an engine of this machine makes of the edits."""
    async with start(tiny_checkpoint) as engine:
        return await run_each(engine, EDITS)


def host_of(remote: Remote, engine: int) -> ProcessHost:
    """The last host that was started for an engine."""
    return next(host for host in reversed(remote[1]) if host.config.data_parallel_rank == engine)


def family_of(host: ProcessHost) -> list[psutil.Process]:
    assert host.process is not None
    process = psutil.Process(host.process.pid)
    return [process, *process.children(recursive=True)]


async def test_it_paints_the_bits_of_an_engine_here(remote: Remote, expected: dict[str, Told]) -> None:
    engine, hosts = remote
    assert await run_each(engine, EDITS) == expected
    told = await ends(await begin(engine, EDITS))
    assert told == expected
    assert len(hosts) == 2


async def test_nobody_without_keys_is_answered(
    remote: Remote, expected: dict[str, Told], listened: set[tuple[str, int]]
) -> None:
    """At none of the ports that a server with remote engines opens, and what runs there goes on."""
    engine, hosts = remote
    opened = listening(each for host in hosts for each in family_of(host))
    assert opened == {("127.0.0.1", host.relay.port) for host in hosts}
    assert len(listening([psutil.Process()]) - listened) == len(hosts), "the relays alone"
    connections = [len(host.relay.connections) for host in hosts]
    tasks = await begin(engine, EDITS)
    for host in hosts:
        raw = [b"", b"GET /health HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000]
        raw.append(bytes(host.relay.connections[0].sent[:GREETING_BYTES]))  # a good beginning, and no word after it
        for came in await asyncio.gather(*(say(host.relay.port, what) for what in raw)):
            assert len(came) <= GREETING_BYTES
        plain, foreign = await asyncio.gather(
            *(meet(host.relay.port, host.epoch, keys, host.key) for keys in (None, CurveKeys.new()))
        )
        assert plain.handshakes & (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
        assert foreign.handshakes & zmq.Event.HANDSHAKE_FAILED_AUTH
        assert not (plain.handshakes | foreign.handshakes) & zmq.Event.HANDSHAKE_SUCCEEDED
        assert not plain.answers
        assert not foreign.answers
    assert await ends(tasks) == expected
    assert [len(host.relay.connections) for host in hosts] == connections, "nobody has taken the place of another"


async def test_what_was_captured_does_nothing_when_it_is_sent_again(remote: Remote, expected: dict[str, Told]) -> None:
    """From the beginning over another connection, or a part of it over the one that it was captured of, which ends that
    connection and nothing else."""
    engine, hosts = remote
    for host in hosts:
        for connection in list(host.relay.connections):
            sent = bytes(connection.sent)
            assert len(sent) > 1000, "an edit was sent"
            assert await replay(host.relay.port, sent) == b""
    tasks = await begin(engine, EDITS)
    for host in hosts:
        before = len(host.relay.connections)
        for connection in host.relay.connections[-3:]:
            connection.to_host.write(connection.last)
        await until(lambda host=host, before=before: len(host.relay.connections) >= before + 3, seconds=10)
    assert await ends(tasks) == expected
    assert len(hosts) == 2, "no engine was given up"


async def test_connections_that_break_lose_nothing(remote: Remote, expected: dict[str, Told]) -> None:
    engine, hosts = remote
    tasks = await begin(engine, EDITS)
    while not all(task.done() for task in tasks.values()):
        for host in hosts:
            host.relay.cut()
        await asyncio.sleep(0.3)
    assert await ends(tasks) == expected
    assert all(len(host.relay.connections) > 3 for host in hosts), "they were broken"
    assert len(hosts) == 2, "no engine was given up"


async def test_another_engine_goes_on_when_a_host_dies(remote: Remote, expected: dict[str, Told]) -> None:
    engine, _ = remote
    family = family_of(host_of(remote, 0))
    tasks = await begin(engine, EDITS)
    await asyncio.sleep(0.2)
    killed = time.monotonic()
    family[0].kill()
    await until(lambda: not engine.alive[0])
    assert time.monotonic() - killed < 2.0
    assert await ends(tasks) == expected
    await until(lambda: all(engine.alive))
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


async def test_a_machine_that_stops_is_given_up_and_what_it_does_later_reaches_nobody(
    remote: Remote, expected: dict[str, Told]
) -> None:
    engine, _ = remote
    former = host_of(remote, 1)
    former.is_cut_off = True
    family = family_of(former)
    restarts = count(engine, "engine_restarts")
    tasks = await begin(engine, EDITS)
    await asyncio.sleep(0.2)
    for process in family:
        process.suspend()
    await until(lambda: not engine.alive[1], seconds=5.0)
    assert await ends(tasks) == expected
    tasks = await begin(engine, EDITS)
    for process in family:
        process.resume()
    assert await ends(tasks) == expected
    assert count(engine, "engine_restarts") == restarts + 1
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive, "it ends by itself"
    await former.wait()

"""Two engines on two machines of a Ray cluster, shared by the tests, in this order. `make test-ray` runs them, in a
network namespace of their own.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from fault_kit import EDITS, Told, begin, ends, run_each, start, until
from ray_server import serve

from benchmarks.load.ray_machines import Machines, hosts_of, machines
from core.config import EngineConfig, ModelConfig
from engine.client.async_engine import AsyncEngine
from engine.cluster.host_config import HostConfig
from engine.router import engine_replica

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]

Cluster = tuple[AsyncEngine, Machines]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Engines for which each death counts as the first."""
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(engine_replica, "PROVEN_SECONDS", 0.0)
        found = stack.enter_context(machines(tmp_path_factory.mktemp("r")))
        ray = {"data_parallel_backend": "ray", "ray_address": found.address}
        yield await stack.enter_async_context(start(tiny_checkpoint, 2, **ray)), found  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tiny_checkpoint: Path) -> dict[str, Told]:
    """What an engine of this machine makes of the edits."""
    async with start(tiny_checkpoint) as engine:
        return await run_each(engine, EDITS)


def tree(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


async def died(engine: AsyncEngine, seconds: float) -> None:
    began = time.monotonic()
    await until(lambda: not all(engine.alive))
    assert time.monotonic() - began < seconds


async def test_engines_are_on_both_machines_and_paint_the_bits_of_one_here(
    cluster: Cluster, expected: dict[str, Told]
) -> None:
    engine, found = cluster
    assert [len(hosts_of(raylet)) for raylet in found.raylets] == [1, 1]
    assert await run_each(engine, EDITS) == expected
    assert await ends(await begin(engine, EDITS)) == expected


async def test_an_engine_without_room_that_is_ended_leaves_nothing(cluster: Cluster, tiny_checkpoint: Path) -> None:
    """Whenever it is ended. Nothing is logged by the event loop, either."""

    from ray.util import placement_group_table

    from engine.cluster.ray_host import RayHost

    async def joined() -> None:
        pass

    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    config = EngineConfig(models=(ModelConfig(model=str(tiny_checkpoint), threads=1),))
    for seconds in (0.0, 0.01, 1.0):
        host = RayHost(config, joined, lambda: False)
        task = asyncio.create_task(host.start(HostConfig(config, 4096, 1, b"")))
        await asyncio.sleep(seconds)
        assert host.placed is None
        task.cancel()
        await asyncio.wait([task])
        await host.end()
        del host, task
    await asyncio.sleep(1.0)
    gc.collect()
    assert errors == []
    states = sorted(group["state"] for group in placement_group_table().values())
    assert [state for state in states if state != "REMOVED"] == ["CREATED", "CREATED"]


async def test_a_host_that_dies(cluster: Cluster, expected: dict[str, Told]) -> None:
    engine, found = cluster
    family = tree(hosts_of(found.raylets[0])[0])
    tasks = await begin(engine, EDITS)
    family[0].kill()
    await died(engine, 2.0)
    assert await ends(tasks) == expected
    _, alive = psutil.wait_procs(family[1:], timeout=5)
    assert not alive
    await until(lambda: all(engine.alive))


async def test_a_raylet_that_dies_takes_its_engine_along_which_goes_where_there_is_room(
    cluster: Cluster, expected: dict[str, Told]
) -> None:
    engine, found = cluster
    family = tree(hosts_of(found.raylets[1])[0])
    tasks = await begin(engine, EDITS)
    found.raylets[1].kill()
    await died(engine, 3.0)  # 0.7 to 1 s, later where other programs have the cores
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert await ends(tasks) == expected
    await asyncio.to_thread(found.add)
    await until(lambda: all(engine.alive))
    assert len(hosts_of(found.raylets[2])) == 1
    assert await run_each(engine, EDITS) == expected


async def test_a_machine_that_stops_is_given_up(cluster: Cluster, expected: dict[str, Told]) -> None:
    engine, found = cluster
    family = tree(found.raylets[2])
    tasks = await begin(engine, EDITS)
    for process in family:
        process.suspend()
    await died(engine, 10.0)
    assert await ends(tasks) == expected
    for process in family:
        process.resume()
    if not all(engine.alive):
        await asyncio.to_thread(found.add)
    await until(lambda: all(engine.alive))
    assert await run_each(engine, EDITS) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_server_that_ends_leaves_nothing(
    cluster: Cluster, tiny_checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    engine, found = cluster
    assert all(engine.alive), "a new machine is for the server alone"
    if number == signal.SIGTERM:
        await asyncio.to_thread(found.add)
    log = tmp_path / "log"
    server = await serve(tiny_checkpoint, found, log)
    try:
        await until(lambda: "ready on" in log.read_text())
        family = [each for host in hosts_of(found.raylets[-1]) for each in tree(host)]
        assert family
        server.send_signal(number)
        await asyncio.wait_for(server.wait(), 30)
    finally:
        with suppress(ProcessLookupError):
            server.kill()
    assert server.returncode == (0 if number == signal.SIGTERM else -number)
    assert "SIGTERM received" not in log.read_text()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=5)
    assert not alive

"""As many engines as a Ray cluster has room for, while machines join it, are about to leave, and die."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from fault_kit import EDITS, begin, count, ends, run_each, start, until

from benchmarks.load.ray_machines import machines
from engine.client.async_engine import AsyncEngine

pytestmark = pytest.mark.ray


def machine_of(engine: AsyncEngine, number: int) -> str:
    return engine.services.engines.replicas[number].machine


def drain(address: str, machine: str) -> None:
    """As an autoscaler, or `ray drain-node`, before a machine ends."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    is_accepted, why = GcsClient(address=address).drain_node(machine, DRAIN_NODE_REASON_PREEMPTION, "a test", 0)
    assert is_accepted, why


def raylet_of(raylets: list[psutil.Process], machine: str) -> psutil.Process:
    living = [each for each in raylets if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    (found,) = [each for each in living if machine in " ".join(each.cmdline())]
    return found


def is_working(engine: AsyncEngine) -> bool:
    """Whether all engines run edits."""
    return all(load is not None and load.num_running for load in engine.loads)


async def test_the_number_of_engines_follows_the_cluster(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with start(tiny_checkpoint) as engine:
        expected = await run_each(engine, EDITS)
    with machines(tmp_path_factory.mktemp("r")) as found:
        ray = {"data_parallel_backend": "ray", "ray_address": found.address}
        async with start(tiny_checkpoint, 0, **ray) as engine:  # type: ignore[arg-type]
            await until(lambda: engine.alive == (True, True))
            await asyncio.to_thread(found.add)
            await until(lambda: engine.alive == (True, True, True))
            assert len({machine_of(engine, number) for number in engine.engines}) == 3
            assert [link and link.machine for link in engine.links] == ["127.0.0.1"] * 3

            tasks = await begin(engine, EDITS)
            await until(lambda: is_working(engine))
            await asyncio.to_thread(drain, found.address, machine_of(engine, 1))
            await until(lambda: engine.replicas[1][0] == "draining")
            assert engine.alive == (True, False, True)
            await until(lambda: engine.engines == (0, 2))
            assert await ends(tasks) == expected
            assert (count(engine, "request_retries"), engine.is_ready) == (0, True)

            tasks = await begin(engine, EDITS)
            await until(lambda: is_working(engine))
            raylet_of(found.raylets, machine_of(engine, 0)).kill()
            await until(lambda: engine.engines == (2,))
            assert await ends(tasks) == expected
            assert engine.alive == (True,)
            assert await run_each(engine, EDITS) == expected

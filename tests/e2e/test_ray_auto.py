"""As many engines as a Ray cluster has room for, while machines join it, are about to leave, and die."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fault_kit import EDITS, begin, count, ends, run_each, start, until
from ray_machines import machines

from engine.client.async_engine import AsyncEngine

pytestmark = pytest.mark.ray


def machine_of(engine: AsyncEngine, number: int) -> str:
    return engine.services.router._replicas[number].machine


def drain(address: str, machine: str) -> None:
    """As an autoscaler does before it ends a machine."""
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "drain-node", "--address", address]
    subprocess.run([*command, "--node-id", machine, *why], check=True, timeout=60)


def raylet_of(raylets: list[psutil.Process], machine: str) -> psutil.Process:
    (found,) = [each for each in raylets if each.is_running() and machine in " ".join(each.cmdline())]
    return found


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
            await asyncio.to_thread(drain, found.address, machine_of(engine, 1))
            await until(lambda: engine.engines == (0, 2))
            assert await ends(tasks) == expected
            assert (count(engine, "request_retries"), engine.is_ready) == (0, True)

            tasks = await begin(engine, EDITS)
            raylet_of(found.raylets, machine_of(engine, 0)).kill()
            await until(lambda: engine.engines == (2,))
            assert await ends(tasks) == expected
            assert engine.alive == (True,)
            assert await run_each(engine, EDITS) == expected

"""HostActor: the process in which Ray runs an EngineHost."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import msgspec
import ray

from core.ipc.process import die_with_parent
from engine.cluster.engine_bundle import at_machine
from engine.cluster.engine_host import EngineHost
from engine.cluster.host_config import HostAddress, HostConfig
from engine.cluster.ray_cluster import nodes_of_cluster
from engine.cluster.release import check_same


def take_own_priority() -> None:
    """Ray's workers give way to all other processes (niceness 15), on a busy machine until they seem to have stopped.
    Where this process may not raise itself, RAY_worker_niceness=0 does it, for all that a machine runs.
    """
    for thread in os.listdir("/proc/self/task"):  # each has a priority of its own, which its children inherit
        with suppress(PermissionError, ProcessLookupError):  # threads of Ray end meanwhile
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)


@ray.remote
class HostActor:
    """Runs an EngineHost in a worker process of Ray."""

    def __init__(self) -> None:
        die_with_parent()  # the raylet, whose end Ray may notice late
        take_own_priority()
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, which engines would inherit
        self._running: asyncio.Task[str] | None = None

    async def start(self, encoded: bytes, bundle: dict[str, float], digest: str) -> bytes:
        """Start the host; a HostAddress, encoded, once it listens. digest: of the API server's code."""
        context = ray.get_runtime_context()
        node = next(node for node in nodes_of_cluster() if node["NodeID"] == context.get_node_id())
        check_same(digest, node["NodeManagerAddress"])
        config = msgspec.msgpack.decode(encoded, type=HostConfig)
        engine = at_machine(config.engine, bundle, node["Resources"])
        config = msgspec.structs.replace(config, engine=engine, address=node["NodeManagerAddress"])
        listening: asyncio.Future[HostAddress] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(EngineHost(config).run(listening.set_result))
        self._running.add_done_callback(lambda running: listening.cancel())
        await asyncio.wait([listening])
        if listening.cancelled():
            self._running.result()
        return msgspec.msgpack.encode(listening.result())

    async def run(self) -> str:
        """Wait until the host has ended; how."""
        assert self._running is not None
        return await self._running

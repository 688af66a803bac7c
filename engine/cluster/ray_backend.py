"""RayBackend: starts engines on the machines of a Ray cluster.

Ray places processes and tells of their ends; messages and arrays go past it. Each engine has a placement group of one
bundle, so that its workers are on one machine, and an actor that is never restarted by Ray: an EngineReplica restarts
engines here as it does on a single machine, wherever there is room.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import ray
import zmq.asyncio
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.config import EngineConfig
from core.errors import ConfigError, EngineDeadError
from core.ipc.logs import of_request
from core.ipc.shared_array import Arena
from engine.cluster.engine_host import EngineHost
from engine.cluster.host_config import HostAddress, HostConfig
from engine.cluster.remote_backend import RemoteBackend
from engine.router.engine_backend import StartedEngine
from engine.router.local_backend import LocalBackend

logger = logging.getLogger("stencil.router")

NAMESPACE, LOOPBACK = "stencil", "127.0.0.1"

TELL_SECONDS = 10.0
"""How long an engine waits for a machine with room before the log says so."""

PR_SET_PDEATHSIG = 1


class RayBackend:
    """See EngineBackend. The first engines may be of this machine."""

    def __init__(self, config: EngineConfig, arena: Arena) -> None:
        """Joins the cluster with the first engine that is started there."""
        self._address = config.ray_address
        self._num_local = config.num_local
        self._local = LocalBackend(arena)
        self._remote = RemoteBackend(arena, lambda config: RayHost(config, self._join))
        self._joining: asyncio.Task[None] | None = None

    def start(self, config: EngineConfig, epoch: int, socket: zmq.asyncio.Socket) -> StartedEngine:
        """See EngineBackend."""
        backend = self._local if config.data_parallel_rank < self._num_local else self._remote
        return backend.start(config, epoch, socket)

    async def close(self) -> None:
        """Leave the cluster, which ends what is still there of this process."""
        if self._joining is not None:
            with suppress(ConfigError):
                await self._joining
            await asyncio.to_thread(ray.shutdown)

    async def _join(self) -> None:
        """Become a client of the cluster, once. Raises ConfigError."""
        if self._joining is None:
            self._joining = asyncio.create_task(self._connect())
        await asyncio.shield(self._joining)

    async def _connect(self) -> None:
        address = self._address
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address.startswith(LOOPBACK):  # Ray would say which address this machine has in its network
            options["_node_ip_address"] = LOOPBACK
        try:
            await asyncio.to_thread(ray.init, address=address, namespace=NAMESPACE, **options)
        except (RayError, ConnectionError, ValueError, RuntimeError) as error:
            message = f"there is no Ray cluster at {address}: {error}; start one with `ray start --head`"
            raise ConfigError(message) from error
        check_authentication([str(node["NodeManagerAddress"]) for node in _nodes()], os.environ)


class RayHost:
    """See `engine.cluster.remote_backend.Host`."""

    def __init__(self, config: EngineConfig, join: Callable[[], Awaitable[None]]) -> None:
        """join: makes this process a client of the cluster."""
        self._join = join
        self._config = config
        self._name = f"stencil-engine-{config.data_parallel_rank}"
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._run: Awaitable[str] | None = None

    async def start(self, config: HostConfig) -> HostAddress:
        """See Host. Waits until a machine has room."""
        await self._join()
        bundle = bundle_of(self._config, has_gpus=any(node["Resources"].get("GPU") for node in _nodes()))
        self._group = placement_group([bundle], strategy="STRICT_PACK")
        await self._placed(self._group)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": strategy, "max_concurrency": 4}
        needs = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        self._actor = _HostActor.options(**options, **needs).remote()  # type: ignore[attr-defined]
        try:
            address = await self._actor.start.remote(msgspec.msgpack.encode(config), bundle)
        except RayError as error:
            raise EngineDeadError(f"its host could not be started: {error}") from error
        self._run = self._actor.run.remote()
        return msgspec.msgpack.decode(address, type=HostAddress)

    async def _placed(self, group: PlacementGroup) -> None:
        ready = asyncio.wrap_future(group.ready().future())
        done, _ = await asyncio.wait([ready], timeout=TELL_SECONDS)
        if not done:
            text = "%s waits for a machine of the cluster that has room for %s"
            logger.warning(text, self._name, group.bundle_specs, extra=of_request(""))
        await ready

    async def wait(self) -> str:
        """See Host."""
        assert self._run is not None
        try:
            return await self._run
        except RayError as error:
            return f"its host has ended: {type(error).__name__}"

    async def end(self) -> None:
        """See Host."""
        actor, group = self._actor, self._group
        if actor is not None:
            with suppress(RayError):
                await asyncio.to_thread(ray.kill, actor)
        if group is not None:
            with suppress(RayError):
                await asyncio.to_thread(remove_placement_group, group)


def check_authentication(addresses: Iterable[str], environment: Mapping[str, str]) -> None:
    """Raises ConfigError for a cluster that whoever reaches its ports may run anything on."""
    if environment.get("RAY_AUTH_MODE") != "token" and any(not each.startswith("127.") for each in addresses):
        raise ConfigError(
            "the Ray cluster asks for no token, so that whoever reaches its ports may run anything on it; start it and "
            "this server with RAY_AUTH_MODE=token (docs/cluster.md)"
        )


def _nodes() -> list[dict[str, Any]]:
    """What Ray knows of the cluster's machines."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def bundle_of(config: EngineConfig, *, has_gpus: bool) -> dict[str, float]:
    """What an engine asks of a machine: a GPU for each worker, or as many cores as its workers have threads. has_gpus:
    whether the cluster has any.
    """
    model, workers = config.models[0], config.workers_per_engine
    if model.device.startswith("cuda") or (model.device == "auto" and has_gpus):
        return {"CPU": 1, "GPU": workers}
    return {"CPU": workers * max(1, model.threads or 1)}


@ray.remote
class _HostActor:
    """Runs an EngineHost in a worker process of Ray."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # with the raylet, which Ray may notice late
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, which engines would inherit
        self._running: asyncio.Task[str] | None = None

    async def start(self, encoded: bytes, bundle: dict[str, float]) -> bytes:
        """Start the host; a HostAddress, encoded, once it listens."""
        context = ray.get_runtime_context()
        config = msgspec.msgpack.decode(encoded, type=HostConfig)
        node = next(node for node in _nodes() if node["NodeID"] == context.get_node_id())
        key = "GPU" if "GPU" in bundle else "CPU"
        room = max(1, int(node["Resources"].get(key, 1) // bundle[key]))
        engine = msgspec.structs.replace(config.engine, local_size=room, local_rank=0, keeper="", launcher="")
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

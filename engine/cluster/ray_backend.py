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
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread, current_thread, main_thread
from typing import Any

import msgspec
import ray
import zmq.asyncio
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.config import EngineConfig
from core.errors import ConfigError, EngineDeadError
from core.ipc.logs import of_request
from core.ipc.shared_array import Arena
from engine.cluster.engine_host import EngineHost
from engine.cluster.host_config import HostAddress, HostConfig
from engine.cluster.release import check_same, source_digest
from engine.cluster.remote_backend import RemoteBackend
from engine.router.engine_backend import StartedEngine
from engine.router.local_backend import LocalBackend

logger = logging.getLogger("stencil.router")

NAMESPACE, LOOPBACK = "stencil", "127.0.0.1"

TELL_SECONDS = 10.0
"""How long an engine waits for a machine with room before the log says so."""

REACH_SECONDS = 5.0
"""How long to try whether anything listens at the cluster's address."""

JOIN_SECONDS = 60.0
"""How long joining a cluster may take: less than a second where it is there, and no machine of it is busy."""

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
            await asyncio.wait([self._joining])
            if ray.is_initialized():
                await asyncio.to_thread(ray.shutdown)

    async def _join(self) -> None:
        """Become a client of the cluster, once. Raises ConfigError."""
        if self._joining is None:
            self._joining = asyncio.create_task(asyncio.to_thread(join, self._address))
            self._joining.add_done_callback(_retrieve)
        await asyncio.shield(self._joining)
        _restore_signal_handlers()


class RayHost:
    """See `engine.cluster.remote_backend.Host`."""

    def __init__(self, config: EngineConfig, join: Callable[[], Awaitable[None]]) -> None:
        """join: makes this process a client of the cluster."""
        self.placed: float | None = None
        self._join = join
        self._config = config
        self._name = f"stencil-engine-{config.data_parallel_rank}"
        self._bundle: dict[str, float] = {}
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._run: Awaitable[str] | None = None
        self._calling: asyncio.Task[None] | None = None
        self._has_ended = False

    async def start(self, config: HostConfig) -> HostAddress:
        """See Host. Waits until a machine has room."""
        await self._join()
        await self._call(self._make_group)
        await self._wait_for_room()
        self.placed = time.monotonic()
        await self._call(self._make_actor)
        try:
            encoded = await self._actor.start.remote(msgspec.msgpack.encode(config), self._bundle, source_digest())
        except RayError as error:
            raise EngineDeadError(f"its host could not be started: {_reason(error)}") from error
        self._run = self._actor.run.remote()
        return msgspec.msgpack.decode(encoded, type=HostAddress)

    async def _call(self, function: Callable[[], None]) -> None:
        """Run what waits for Ray in a thread. It goes on when this is cancelled; `end` waits for it."""
        self._calling = asyncio.create_task(asyncio.to_thread(function))
        self._calling.add_done_callback(_retrieve)
        await asyncio.shield(self._calling)

    def _make_group(self) -> None:
        self._bundle = bundle_of(self._config, has_gpus=any(node["Resources"].get("GPU") for node in _nodes()))
        self._group = placement_group([self._bundle], strategy="STRICT_PACK")
        if self._has_ended:
            self._remove()

    def _make_actor(self) -> None:
        assert self._group is not None
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": strategy, "max_concurrency": 4}
        needs = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
        self._actor = _HostActor.options(**options, **needs).remote()  # type: ignore[attr-defined]
        if self._has_ended:
            self._remove()

    async def _wait_for_room(self) -> None:
        assert self._group is not None
        ready = asyncio.wrap_future(self._group.ready().future())
        try:
            done, _ = await asyncio.wait([ready], timeout=TELL_SECONDS)
            if not done:
                text = "%s waits for a machine of the cluster that has room for %s"
                logger.warning(text, self._name, self._bundle, extra=of_request(""))
            await ready
        except RayError as error:
            raise EngineDeadError(f"no machine was found for it: {_reason(error)}") from error
        finally:
            ready.cancel()  # or it would fail when `end` removes the group
            if ready.done():
                _retrieve(ready)

    async def wait(self) -> str:
        """See Host."""
        assert self._run is not None
        try:
            return await self._run
        except RayError as error:
            return f"its host has ended: {_reason(error)}"

    async def end(self) -> None:
        """See Host."""
        self._has_ended = True
        if self._calling is not None:
            await asyncio.wait([self._calling])
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        if self._actor is not None:
            with suppress(RayError):
                ray.kill(self._actor)
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)


def _restore_signal_handlers() -> None:
    """Take back what `ray.init` has done below Python: it would tell of each SIGTERM as if the process had crashed."""
    if current_thread() is main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Take the error of what may have nobody left who waits for it: the event loop would log it."""
    if not future.cancelled():
        future.exception()


def _reason(error: RayError) -> str:
    """Why something of Ray has failed, in a line."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    return type(error).__name__


def join(address: str) -> None:
    """Make this process a client of the Ray cluster at this address. Raises ConfigError."""
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), REACH_SECONDS).close()
        _within(JOIN_SECONDS, lambda: _connect(address))
    except (RayError, OSError, ValueError, RuntimeError) as error:
        message = f"there is no Ray cluster at {address}: {error}; start one with `ray start --head`"
        raise ConfigError(message) from error
    addresses = [str(node["NodeManagerAddress"]) for node in _nodes()]
    check_authentication(addresses, lambda: _answers_without_token(ray.get_runtime_context().gcs_address))


def _connect(address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address.startswith(LOOPBACK):  # Ray would say which address this machine has in its network
        options["_node_ip_address"] = LOOPBACK
    ray.init(address=address, namespace=NAMESPACE, **options)


def _within(seconds: float, function: Callable[[], None]) -> None:
    """Run what Ray may try for minutes, in a thread that keeps no process from ending. Raises its error, or
    TimeoutError."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    Thread(target=run, name="join-ray", daemon=True).start()
    try:
        done.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(f"no answer in {seconds:g} s") from error


def check_authentication(addresses: Iterable[str], answers_without_token: Callable[[], bool]) -> None:
    """Raises ConfigError for a cluster that whoever reaches its ports may run anything on. answers_without_token: asked
    only if the cluster is not on this machine alone.
    """
    if any(not each.startswith("127.") for each in addresses) and answers_without_token():
        raise ConfigError(
            "the Ray cluster asks for no token, so that whoever reaches its ports may run anything on it; start it and "
            "this server with RAY_AUTH_MODE=token (docs/cluster.md)"
        )


def _answers_without_token(address: str) -> bool:
    """Whether the cluster serves who has none. Asked by another process: Ray reads its settings once."""
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "status", "--address", address]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    asked = subprocess.run(command, env=environment, timeout=JOIN_SECONDS, check=False, capture_output=True, text=True)
    return "InvalidAuthToken" not in asked.stdout + asked.stderr


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


def at_machine(config: EngineConfig, bundle: Mapping[str, float], resources: Mapping[str, float]) -> EngineConfig:
    """An engine's configuration on its machine. resources: all that the machine has. It shares the cores with as many
    engines as have room there, and sees no GPUs but its own.
    """
    size = 1 if "GPU" in bundle else max(1, int(resources.get("CPU", 1) // bundle["CPU"]))
    return msgspec.structs.replace(config, local_size=size, keeper="", launcher="")


@ray.remote
class _HostActor:
    """Runs an EngineHost in a worker process of Ray."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # with the raylet, which Ray may notice late
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, which engines would inherit
        self._running: asyncio.Task[str] | None = None

    async def start(self, encoded: bytes, bundle: dict[str, float], digest: str) -> bytes:
        """Start the host; a HostAddress, encoded, once it listens. digest: of the API server's code."""
        context = ray.get_runtime_context()
        node = next(node for node in _nodes() if node["NodeID"] == context.get_node_id())
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

"""RayBackend: starts engines on the machines of a Ray cluster.

Ray places processes and tells of their ends; messages and arrays go past it. Each engine has a placement group of one
bundle, so that its workers are on one machine, and an actor that is never restarted by Ray: an EngineReplica restarts
engines here as it does on a single machine, wherever there is room.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import zmq.asyncio

from core.config import EngineConfig
from core.errors import EngineError
from core.ipc.shared_array import Arena
from core.routing.placement import Machine
from engine.cluster.engine_bundle import bundle_of
from engine.cluster.ray_cluster import (
    ERRORS,
    draining_nodes,
    forget,
    in_thread,
    join,
    leave,
    machines_of,
    nodes_of_cluster,
    restore_signal_handlers,
)
from engine.cluster.ray_host import RayHost, retrieve
from engine.cluster.remote_backend import RemoteBackend
from engine.router.engine_backend import StartedEngine
from engine.router.local_backend import LocalBackend

logger = logging.getLogger("stencil.router")

LEAVE_SECONDS = 5.0
"""How long leaving the cluster may take."""


class RayBackend:
    """See EngineBackend. The first engines may be of this machine."""

    def __init__(self, config: EngineConfig, arena: Arena) -> None:
        """Joins the cluster with the first engine that is started there."""
        self._config = config
        self._address = config.ray_address
        self._num_local = config.num_local
        self._local = LocalBackend(arena)
        self._remote = RemoteBackend(arena, lambda config: RayHost(config, self._join, self._has_gpus))
        self._joining: asyncio.Future[None] | None = None
        self._gpus_seen: bool | None = None

    def start(self, config: EngineConfig, epoch: int, socket: zmq.asyncio.Socket) -> StartedEngine:
        """See EngineBackend."""
        backend = self._local if config.data_parallel_rank < self._num_local else self._remote
        return backend.start(config, epoch, socket)

    async def machines(self) -> dict[str, Machine]:
        """See Cluster."""
        await self._join()
        try:
            return await asyncio.wrap_future(in_thread(self._machines))
        except ERRORS as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error

    def _machines(self) -> dict[str, Machine]:
        bundle = bundle_of(self._config, has_gpus=self._has_gpus())
        return machines_of(nodes_of_cluster(), draining_nodes(), bundle)

    def _has_gpus(self) -> bool:
        """Whether the cluster had any GPU when this was first asked: engines are all alike."""
        if self._gpus_seen is None:
            self._gpus_seen = any(node["Resources"].get("GPU") for node in nodes_of_cluster() if node["Alive"])
        return self._gpus_seen

    async def close(self) -> None:
        """Leave the cluster, which ends what is still there of this process."""
        await self._remote.close()
        if self._joining is not None:
            await asyncio.wait([self._joining], timeout=LEAVE_SECONDS)
            leaving = asyncio.wrap_future(in_thread(leave))
            leaving.add_done_callback(retrieve)
            await asyncio.wait([leaving], timeout=LEAVE_SECONDS)
            if not (self._joining.done() and leaving.done()):
                logger.warning("the Ray cluster's head does not answer: left without its knowledge")
                forget()

    async def _join(self) -> None:
        """Become a client of the cluster, once. Raises ConfigError."""
        if self._joining is None:
            self._joining = asyncio.wrap_future(in_thread(partial(join, self._address)))
            self._joining.add_done_callback(retrieve)
            self._joining.add_done_callback(lambda joining: restore_signal_handlers())  # in the loop's thread
        await asyncio.shield(self._joining)

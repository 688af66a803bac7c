"""RayHost: a host of an engine that Ray places on a machine with room for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.config import EngineConfig
from core.errors import EngineDeadError, StencilError, first_error
from core.ipc.logs import of_request
from engine.cluster.engine_bundle import bundle_of
from engine.cluster.host_actor import HostActor
from engine.cluster.host_config import HostAddress, HostConfig
from engine.cluster.ray_cluster import check_membership, in_thread
from engine.cluster.release import source_digest

logger = logging.getLogger("stencil.router")

TELL_SECONDS = 10.0
"""How long an engine waits for a machine with room, or for an answer, before the log says so."""


class RayHost:
    """See `engine.cluster.remote_backend.Host`."""

    def __init__(self, config: EngineConfig, join: Callable[[], Awaitable[None]], has_gpus: Callable[[], bool]) -> None:
        """join: makes this process a client of the cluster. has_gpus: whether the cluster has any, asked after that."""
        self.placed: float | None = None
        self._join, self._has_gpus = join, has_gpus
        self._config = config
        self._name = f"stencil-engine-{config.data_parallel_rank}"
        self._bundle: dict[str, float] = {}
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._run: Awaitable[str] | None = None
        self._calling: asyncio.Future[None] | None = None
        self._machine = ""  # its address, once it is placed
        self._has_ended = False

    async def start(self, config: HostConfig) -> HostAddress:
        """See Host. Waits until a machine has room."""
        await self._join()
        await self._call(self._make_group)
        assert self._group is not None
        try:
            await self._done(self._group.ready(), f"a machine of the cluster that has room for {self._bundle}")
        except RayError as error:
            raise EngineDeadError(f"Ray found no machine for the engine: {_reason(error)}") from error
        self.placed = time.monotonic()
        await self._call(self._make_actor)
        starting = self._actor.start.remote(msgspec.msgpack.encode(config), self._bundle, source_digest())
        try:
            encoded = await self._done(starting, "its process on a machine of the cluster")
        except RayError as error:
            raise EngineDeadError(f"the engine's host could not be started: {_reason(error)}") from error
        self._run = self._actor.run.remote()
        address = msgspec.msgpack.decode(encoded, type=HostAddress)
        self._machine = address.address
        return address

    async def _call(self, function: Callable[[], None]) -> None:
        """Run what waits for Ray in a thread. It goes on when this is cancelled; `end` waits for it."""
        self._calling = asyncio.wrap_future(in_thread(function))
        self._calling.add_done_callback(retrieve)
        done, _ = await asyncio.wait([self._calling], timeout=TELL_SECONDS)
        if not done:
            text = "%s cannot be started: the Ray cluster's head does not answer, see `ray status`"
            logger.warning(text, self._name, extra=of_request(""))
        await asyncio.shield(self._calling)

    def _make_group(self) -> None:
        check_membership()
        self._bundle = bundle_of(self._config, has_gpus=self._has_gpus())
        where = {"ray.io/node-id": self._config.machine} if self._config.machine else {}
        self._group = placement_group([self._bundle], strategy="STRICT_PACK", bundle_label_selector=[where])
        if self._has_ended:
            self._remove()

    def _make_actor(self) -> None:
        assert self._group is not None
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": strategy, "max_concurrency": 4}
        needs = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
        self._actor = HostActor.options(**options, **needs).remote()  # type: ignore[attr-defined]
        if self._has_ended:
            self._remove()

    async def _done(self, asked: Any, what: str) -> Any:
        """The result of what Ray does, which may take for ever: while this process is a client of the cluster. Raises
        RayError if it has failed, EngineDeadError once this process is none. what: is waited for, for the log.
        """
        doing = asyncio.wrap_future(asked.future())
        try:
            done, _ = await asyncio.wait([doing], timeout=TELL_SECONDS)
            if not done:
                logger.warning("%s waits for %s", self._name, what, extra=of_request(""))
            while not done:
                await self._call(check_membership)
                done, _ = await asyncio.wait([doing], timeout=TELL_SECONDS)
            return doing.result()
        finally:
            doing.cancel()  # or it would fail when `end` removes the group
            if doing.done():
                retrieve(doing)

    async def wait(self) -> str:
        """See Host."""
        assert self._run is not None
        try:
            return await self._run
        except RayError as error:
            return f"the engine's host on {self._machine} has died, or Ray's processes there ({_reason(error)})"

    async def end(self) -> None:
        """See Host."""
        self._has_ended = True
        if self._calling is not None:
            await asyncio.wait([self._calling])
        await asyncio.wrap_future(in_thread(self._remove))

    def _remove(self) -> None:
        if self._actor is not None:
            with suppress(RayError):
                ray.kill(self._actor)
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Take the error of what may have nobody left who waits for it: the event loop would log it."""
    if not future.cancelled():
        future.exception()


def _reason(error: RayError) -> str:
    """Why something of Ray has failed, in a line."""
    if not isinstance(error, RayTaskError):
        return type(error).__name__
    cause = first_error(error.cause)
    return str(cause) if isinstance(cause, StencilError) else f"{type(cause).__name__}: {cause}"

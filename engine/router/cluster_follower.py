"""ClusterFollower: keeps as many engines as a cluster has room for, while machines join and leave it.

What is to be done is decided in core/routing/placement.py; Engines does it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from core.errors import EngineError
from core.ipc.logs import of_request
from core.routing.placement import EnginePlace, Machine, changes
from engine.router.engine_backend import Cluster

logger = logging.getLogger("stencil.router")

LOOK_SECONDS = 1.0
"""Between two looks at the cluster."""

TELL_SECONDS = 10.0
"""How long a look may take before the log says so."""


class PlacedEngines(Protocol):
    """The engines; implemented by `engine.router.engines.Engines`. Nothing waits."""

    def placed(self) -> Mapping[int, EnginePlace]:
        """All but those that end, by number."""

    @property
    def room(self) -> int:
        """Numbers that no engine has."""

    def add_engine(self, machine: str) -> int:
        """Have one more started on the machine with this id; its number."""

    def drain_engine(self, number: int) -> None:
        """Send it no more requests."""

    def end_engine(self, number: int, why: str) -> None:
        """End it for good; what it has goes on elsewhere."""


class ClusterFollower:
    """Run `run` as a task until `stopping` is set."""

    def __init__(self, cluster: Cluster, engines: PlacedEngines, stopping: asyncio.Event) -> None:
        self._cluster, self._engines, self._stopping = cluster, engines, stopping
        self._machines: Mapping[str, Machine] = {}  # at the last look
        self._answers = True  # the cluster did at the last look
        self._has_room: bool | None = None  # for any engine, at the last look; None before the first

    async def run(self) -> None:
        """Look, and do what is to be done, until told to stop. Raises ConfigError if there is no cluster."""
        while not self._stopping.is_set():
            looking = asyncio.create_task(self._look())
            stopping = asyncio.create_task(self._stopping.wait())
            try:
                waited_for = asyncio.FIRST_COMPLETED
                done, _ = await asyncio.wait([looking, stopping], timeout=TELL_SECONDS, return_when=waited_for)
                if not done:
                    self._note_silence(f"nothing came in {TELL_SECONDS:g} s")
                    await asyncio.wait([looking, stopping], return_when=waited_for)
                if looking.done():
                    looking.result()
            finally:
                looking.cancel()
                stopping.cancel()
                await asyncio.wait([looking, stopping])
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LOOK_SECONDS)

    async def _look(self) -> None:
        try:
            machines = await self._cluster.machines()
        except EngineError as error:
            return self._note_silence(str(error))
        if self._stopping.is_set():
            return
        self._answers = True
        self._tell(machines)
        self._machines = machines
        self._change()

    def _note_silence(self, why: str) -> None:
        if self._answers:
            logger.warning("the cluster does not answer: %s", why, extra=of_request(""))
        self._answers = False

    def _change(self) -> None:
        engines = self._engines.placed()
        todo = changes(self._machines, engines, len(engines) + self._engines.room)
        for number in todo.drain:
            self._engines.drain_engine(number)
        for number in todo.leave:
            has_left = engines[number].machine not in self._machines
            self._engines.end_engine(number, f"the engine's machine {'has left' if has_left else 'is about to leave'}")
        for machine in todo.start:
            number = self._engines.add_engine(machine)
            text = "engine %d starts at %s, which has room for %d"
            logger.info(text, number, *self._machines[machine][:2], extra=of_request(""))

    def _tell(self, machines: Mapping[str, Machine]) -> None:
        """Log which machines have left since the last look, or are about to, and when there is room for none."""
        for key, machine in self._machines.items():
            if key not in machines:
                logger.warning("%s has left the cluster", machine.address, extra=of_request(""))
            elif machines[key].is_draining and not machine.is_draining:
                text = "%s is about to leave the cluster: its engines end after their requests"
                logger.warning(text, machine.address, extra=of_request(""))
        has_room = any(machine.room for machine in machines.values())
        if not has_room and self._has_room is not has_room:
            logger.warning("no machine of the cluster has room for an engine", extra=of_request(""))
        self._has_room = has_room

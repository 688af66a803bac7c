"""EngineBackend: what starts engines and tells of their deaths: `LocalBackend`, and those of engine/cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import zmq.asyncio

from core.config import EngineConfig
from core.routing.placement import Machine


class MachineLink(NamedTuple):
    """The way to an engine of another machine."""

    machine: str  # its address
    silent_seconds: float  # since anything was heard of it
    byte_seconds: float  # seconds that a byte of a request's arrays takes, each way


class StartedEngine(Protocol):
    """One incarnation of an engine, as its client sees it. It is gone when neither it nor any of its workers can touch
    a request's memory any more.
    """

    @property
    def placed(self) -> float | None:
        """When a machine had room for it, seconds of CLOCK_MONOTONIC; None: none has yet."""

    @property
    def link(self) -> MachineLink | None:
        """The way to it; None: it is of this machine, or of none yet."""

    async def wait(self) -> object:
        """Wait until it is gone. Any number of tasks may wait."""

    async def stop(self, grace: float) -> object:
        """End it and wait until it is gone. grace: seconds in which it may end by itself. Raises EngineError if it
        cannot be ended."""

    def kill(self) -> None:
        """End it at once, unless it is gone."""

    def describe_exit(self) -> str:
        """Why it is gone: a sentence that people read, without its full stop."""

    def close(self) -> None:
        """Remove what is left of it, once it is gone."""


class EngineBackend(Protocol):
    """Starts engines."""

    def start(self, config: EngineConfig, epoch: int, socket: zmq.asyncio.Socket) -> StartedEngine:
        """Bind `socket` where the engine reaches it, start the engine and return; nothing waits until it has connected.
        epoch: of this incarnation, see `core.messages.envelope`. Raises ConfigError.
        """

    async def close(self) -> None:
        """Let go of what it starts engines with, once all are gone."""


class Cluster(Protocol):
    """Machines that engines are started on, whose number changes."""

    async def machines(self) -> Mapping[str, Machine]:
        """Those that are there now, by id. Raises ConfigError if there is no such cluster, EngineError while it gives
        no answer."""

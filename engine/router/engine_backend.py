"""EngineBackend: what starts engines and tells of their deaths: `LocalBackend`, and those of engine/cluster."""

from __future__ import annotations

from typing import Protocol

import zmq.asyncio

from core.config import EngineConfig


class StartedEngine(Protocol):
    """One incarnation of an engine, as its client sees it. It is gone when neither it nor any of its workers can touch
    a request's memory any more.
    """

    @property
    def placed(self) -> float | None:
        """When a machine had room for it, seconds of CLOCK_MONOTONIC; None: none has yet."""

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

"""EngineHost: an engine with its workers on one machine, for an API server on another one.

The engine is the one that a single machine has, started and spoken to in the same way: the host stands where the API
server stands there. It owns the arena that the engine's requests have their arrays in, fills it with what the API server
sends, and sends back what the engine has made. Messages pass unread but for the places of arrays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from core.errors import MessageError, StencilError
from core.handles import ArrayRef
from core.ipc.logs import of_request
from core.ipc.shared_array import Arena, ArenaAllocator, array_bytes
from core.messages.codec import MessageDecoder
from core.messages.engine import (
    AdaptersUsed,
    EngineFailed,
    EngineOutputs,
    EngineRequest,
    Finished,
    FromEngine,
    PartialImage,
    PrimeTemplate,
    ToEngine,
)
from engine.cluster.connection import Connection
from engine.cluster.curve import CurveKeys, listening
from engine.cluster.link import Frames
from engine.cluster.messages import Delivery, HostAddress, HostConfig
from engine.cluster.request_arrays import arrays_read, arrays_written, moved
from engine.router.running_engine import LocalEngine, RunningEngine

logger = logging.getLogger("stencil.host")

SILENCE_SECONDS = 20.0
"""Without a word of the API server, after which the host ends: it is gone, or has given this engine up."""

FLUSH_SECONDS = 2.0
"""How long a host waits at its end for the API server to have its last messages."""

STOP_SECONDS = 5.0


@dataclass(slots=True)
class _Held:
    """A request's memory. Keys are offsets in the API server's arena."""

    refs: dict[int, ArrayRef] = field(default_factory=dict)  # as allocated, uint8 [bytes]
    have_come: set[int] = field(default_factory=set)
    previews: tuple[int, ...] = ()
    results: tuple[int, ...] = ()  # the other arrays that the engine makes
    has_all: asyncio.Event = field(default_factory=asyncio.Event)  # set when more has come


class EngineHost:
    """A Peer of its API server. `run` once."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._arena = Arena.create(0, config.arena_bytes)
        self._allocator = ArenaAllocator(self._arena)
        self._held: dict[str, _Held] = {}  # by request
        self._inbox: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._outbox: asyncio.Queue[tuple[str, tuple[int, ...], bool]] = asyncio.Queue()
        self._decoder: MessageDecoder[ToEngine] = MessageDecoder(ToEngine)
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it ends
        self._connection: Connection | None = None

    async def run(self, engine: EngineConfigured, on_listening: Callable[[HostAddress], None]) -> str:
        """Serve until the engine has ended or the API server is gone; the reason. on_listening: called once the API
        server can connect. Raises ConfigError.
        """
        raise NotImplementedError

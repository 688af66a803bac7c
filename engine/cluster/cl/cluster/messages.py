"""What the two ends of a connection between machines tell each other beside an engine's own messages."""

from __future__ import annotations

import msgspec

from core.config import EngineConfig


class HostConfig(msgspec.Struct, frozen=True):
    """How a host is started."""

    engine: EngineConfig
    arena_bytes: int  # address space for requests' arrays
    epoch: bytes  # of this connection and no other one
    address: str  # of the host's machine, where it listens
    client: bytes  # public key of the API server


class HostAddress(msgspec.Struct, frozen=True):
    """Where a host that has started listens."""

    address: str
    port: int
    key: bytes  # its public key


class Delivery(msgspec.Struct, frozen=True, array_like=True):
    """What comes before a message of the engine: the arrays that must be there before it is read."""

    arrays: tuple[tuple[str, int], ...] = ()  # request and offset, see `Chunk`

"""What an API server and a host on another machine tell each other when it is started."""

from __future__ import annotations

import msgspec

from core.config import EngineConfig


class HostConfig(msgspec.Struct, frozen=True):
    """How a host is started."""

    engine: EngineConfig
    arena_bytes: int  # address space for requests' arrays
    epoch: int  # of the engine, see `core.messages.envelope`
    client: bytes  # public key of the API server
    address: str = ""  # of the host's machine, where it listens; set there


class HostAddress(msgspec.Struct, frozen=True):
    """Where a host that has started listens."""

    address: str
    port: int
    key: bytes  # its public key

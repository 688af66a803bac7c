"""Sockets between machines: ZeroMQ over TCP, encrypted, where both ends know each other's key (CURVE and ZAP).

CURVE alone lets anybody in who knows the server's public key: the server's authenticator refuses all clients but one.
Each process makes its own secret key, which never leaves it; public keys travel by what starts the processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from core.errors import ConfigError

_DOMAIN = "stencil"
_HANDSHAKE_MS = 3000
_HEARTBEAT_MS, _SILENT_MS = 1000, 4000  # a connection whose other end has vanished is made anew
_RECONNECT_MS, _MOST_RECONNECT_MS = 50, 1000
_MAX_MESSAGE_BYTES = 64 * 1024**2
IO_THREADS = 2
"""Of a context: each encrypts at most 0.3 to 0.6 GB/s."""


class CurveKeys(NamedTuple):
    """Of one process, in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> CurveKeys:
        """A pair that no other process has."""
        return cls(*zmq.curve_keypair())


class _OneClient:
    """The authenticator's question, for one client."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client may connect. key: in Z85, or its 32 bytes."""
        return domain == _DOMAIN and (key if len(key) == len(self._public) else z85.encode(key)) == self._public


@contextmanager
def listening(host: str, keys: CurveKeys, client: bytes) -> Iterator[tuple[zmq.asyncio.Socket, int]]:
    """A ROUTER that serves one client alone, and the port that it listens at. host: an address of this machine. client:
    its public key. Raises ConfigError if it cannot listen there.
    """
    with zmq.asyncio.Context(IO_THREADS) as context:
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        try:
            authenticator.configure_curve_callback(_DOMAIN, _OneClient(client))
            with context.socket(zmq.ROUTER) as socket:
                _configure(socket, keys)
                socket.curve_server = True
                socket.set(zmq.ZAP_DOMAIN, _DOMAIN.encode())
                socket.set(zmq.ROUTER_HANDOVER, 1)  # a client that connects again takes the place of its old connection
                try:
                    port = socket.bind_to_random_port(f"tcp://{host}")
                except zmq.ZMQError as error:
                    raise ConfigError(f"cannot listen at {host}: {error}") from error
                yield socket, port
        finally:
            authenticator.stop()


def connect(context: zmq.asyncio.Context, address: str, keys: CurveKeys, server: bytes, name: bytes) -> Any:
    """A DEALER that is connected, now or as soon as it can be. name: of the connection, for the ROUTER. server: its
    public key; nobody else can answer."""
    socket = context.socket(zmq.DEALER)
    _configure(socket, keys)
    socket.curve_serverkey = server
    socket.set(zmq.ROUTING_ID, name)
    socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS)
    socket.connect(address)
    return socket


def _configure(socket: zmq.asyncio.Socket, keys: CurveKeys) -> None:
    socket.set_hwm(0)  # links limit what is under way
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
    socket.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.curve_publickey, socket.curve_secretkey = keys

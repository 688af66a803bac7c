"""What somebody may try at the ports of hosts without their keys: raw bytes, ZeroMQ without keys and with others, and
what was captured of a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import msgspec
import psutil
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine.cluster.connection import MESSAGES
from engine.cluster.curve import CurveKeys
from engine.cluster.link import Header

GREETING_BYTES = 64
"""Of ZMTP: version and mechanism, which it tells everybody."""
HELLO_BYTES, WELCOME_BYTES = 2 + 200, 2 + 168
"""Of a client's first word in CurveZMQ, and of the answer: a cookie that only that client can read."""
QUIET_SECONDS = 1.0
"""Without a word for so long, nothing more comes."""

HANDSHAKES = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.DISCONNECTED
)


class Met(NamedTuple):
    """What a ZeroMQ socket has met at a port: how its handshakes ended, and what it was sent."""

    handshakes: zmq.Event
    answers: list[list[bytes]]


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Addresses and ports at which these processes listen."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            sockets = process.net_connections("inet")
            found |= {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN}
    return found


async def say(port: int, what: bytes) -> bytes:
    """All that comes back for raw bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(what)
    came = b""
    with suppress(TimeoutError, ConnectionError):
        while data := await asyncio.wait_for(reader.read(1 << 16), QUIET_SECONDS):
            came += data
    writer.transport.abort()
    return came


async def replay(port: int, sent: bytes) -> bytes:
    """All that comes back for what a client has sent before, once it has been told a new cookie."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    first = GREETING_BYTES + HELLO_BYTES
    writer.write(sent[:first])
    await asyncio.wait_for(reader.readexactly(GREETING_BYTES + WELCOME_BYTES), 10)
    writer.write(sent[first:])
    came = b""
    with suppress(ConnectionError):
        came = await asyncio.wait_for(reader.read(), 10)
    writer.transport.abort()
    return came


async def meet(port: int, epoch: int, keys: CurveKeys | None, server: bytes) -> Met:
    """Take the place of an engine's API server, whose messages are known, without its key. keys: of our own, if any.
    server: the host's public key.
    """
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, MESSAGES)
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey = keys
            socket.curve_serverkey = server
        monitor = socket.get_monitor_socket(HANDSHAKES)
        socket.connect(f"tcp://127.0.0.1:{port}")
        for number in (1, 2):
            await socket.send_multipart([msgspec.msgpack.encode(Header(epoch, "content", number, 0)), b"", b""])
        met = Met(zmq.Event(0), [])
        while await monitor.poll(1000 * QUIET_SECONDS):
            met = Met(met.handshakes | (await recv_monitor_message(monitor))["event"], met.answers)
            if met.handshakes & ~zmq.Event.DISCONNECTED and met.handshakes & zmq.Event.DISCONNECTED:
                break
        while await socket.poll(100):
            met.answers.append(await socket.recv_multipart())
        socket.disable_monitor()
        monitor.close()
        return met

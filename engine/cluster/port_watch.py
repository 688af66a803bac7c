"""Notices that the process at the other end of a ZeroMQ connection is gone, sooner than Ray tells of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import zmq
import zmq.asyncio

PROBE_SECONDS = 1.0
"""How long a machine may take to answer whether anything listens at a port."""

PROBE_AFTER_SECONDS = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Before each probe once a connection has broken: a process that dies closes one after the other, the port it may be
last."""


async def until_gone(socket: zmq.asyncio.Socket, address: str, port: int) -> None:
    """Wait until the socket's connection has broken and nothing listens at the other end's port any more: a process
    that dies leaves its port soon. A machine that does not answer says nothing: it may be cut off for a moment.
    """
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        while True:
            await monitor.recv_multipart()
            for seconds in PROBE_AFTER_SECONDS:
                await asyncio.sleep(seconds)
                if await _is_closed(address, port):
                    return
    finally:
        socket.disable_monitor()
        monitor.close()


async def _is_closed(address: str, port: int) -> bool:
    """Whether the machine is there and refuses connections to the port."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return True
    except OSError:  # TimeoutError among them
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return False

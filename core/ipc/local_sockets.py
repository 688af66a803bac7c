"""Sockets between processes of one user on one machine, whose messages may carry descriptors.

The address is in the abstract namespace, so that no file is left behind. Only processes of the same user are let in.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections.abc import Sequence

MESSAGE_BYTES = 1 << 16
"""Longest message."""

_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid


def listen() -> socket.socket:
    """A listening socket with a name that the kernel chose; see `address_of`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")
    listener.listen(1024)
    return listener


def address_of(listener: socket.socket) -> str:
    """What `connect` needs, as text."""
    name: bytes = listener.getsockname()
    return name.removeprefix(b"\0").decode()


def connect(address: str) -> socket.socket:
    """A connection to a listener. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(b"\0" + address.encode())
        if not is_own(connection):
            raise PermissionError(f"the socket {address} is another user's")
    except BaseException:
        connection.close()
        raise
    return connection


def is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


def send(connection: socket.socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send a message, and with it copies of descriptors. Raises OSError if the other end is gone."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    connection.sendmsg([message], rights, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """Wait for the next message: (message, descriptor that came with it, which the caller owns). An empty message: the
    other end is gone."""
    message, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
    return message, fds[0] if fds else None

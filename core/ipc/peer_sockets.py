"""Sockets between the workers of one engine, through which a rank sends a value to another without the engine.

Each rank has one inbox, a datagram socket whose sending end all ranks have. A message is a small header; the data is in
a memfd whose descriptor travels with it, so a sender never waits until the receiver has read, and the kernel frees what
is not received. The engine keeps all ends: a rank that is restarted gets the inbox of the one that has died, with
what was sent to that one, and the engine sends messages about the dead.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import select
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 1 << 16
"""Longest header."""

FULL_SECONDS = 0.01
"""How long a sender waits for room before it looks into its own inbox again."""


class Inboxes:
    """The inboxes of an engine's ranks; none for a single rank, which has nobody to exchange values with."""

    def __init__(self, num_ranks: int) -> None:
        number = num_ranks if num_ranks > 1 else 0
        self._pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(number)]
        self._waiting: list[deque[bytes]] = [deque() for _ in range(number)]  # by rank: messages that find no room

    def ends_of(self, rank: int) -> list[int]:
        """Descriptors for one rank's process, as `PeerSockets` takes them: its own receiving end, and all sending ends.
        Copies, owned by the caller. Raises OSError, and leaves none, if this process may open no more.
        """
        ends = [self._pairs[rank][0], *(sender for _, sender in self._pairs)] if self._pairs else []
        copies = list[int]()
        with ExitStack() as undo:
            for end in ends:
                copies.append(os.dup(end.fileno()))
                undo.callback(os.close, copies[-1])
            undo.pop_all()
        return copies

    def tell(self, rank: int, header: bytes) -> None:
        """Send a rank a message without data; if its inbox is full, once there is room. Never blocks."""
        self._waiting[rank].append(header)
        self._flush(rank)

    def _flush(self, rank: int) -> None:
        loop, sender, waiting = asyncio.get_running_loop(), self._pairs[rank][1], self._waiting[rank]
        while waiting:
            try:
                sender.send(waiting[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                # This may set the socket to non-blocking, for all processes; all send with a flag that says so anyway.
                loop.add_writer(sender.fileno(), self._flush, rank)
                return
            waiting.popleft()
        loop.remove_writer(sender.fileno())

    def close(self) -> None:
        for rank, pair in enumerate(self._pairs):
            if self._waiting[rank]:
                asyncio.get_running_loop().remove_writer(pair[1].fileno())
            for end in pair:
                end.close()


class PeerSockets:
    """One rank's inbox, and the sending ends of all ranks' inboxes."""

    def __init__(self, inbox: int, outboxes: Sequence[int]) -> None:
        """Descriptors, which this object then owns. outboxes: by rank."""
        self._inbox = socket.socket(fileno=inbox)
        self._outboxes = [socket.socket(fileno=fd) for fd in outboxes]

    def post(self, rank: int, header: bytes, data: Sequence[npt.NDArray[np.uint8]] = ()) -> bool:
        """Send a message to a rank, with these arrays one after the other; False if its inbox is full, which holds 10
        to some hundred messages (`net.unix.max_dgram_qlen`).
        """
        fd = _memfd(data) if data else None
        try:
            # socket.send_fds of Python 3.11 drops the flags.
            rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
            self._outboxes[rank].sendmsg([header], rights, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        finally:
            if fd is not None:
                os.close(fd)
        return True

    def has_room(self, rank: int) -> bool:
        """Whether a rank's inbox has room for a message."""
        return bool(select.select([], [self._outboxes[rank]], [], 0)[1])

    def wait_for_room(self, rank: int) -> None:
        """Wait until a rank's inbox has room, or this one a message; at most some milliseconds."""
        select.select([self._inbox], [self._outboxes[rank]], [], FULL_SECONDS)

    def has_message(self) -> bool:
        """Whether `receive` would not wait."""
        return bool(select.select([self._inbox], [], [], 0)[0])

    def receive(self) -> tuple[bytes, npt.NDArray[np.uint8]]:
        """Wait for the next message: (header, data). The data is empty if none was sent."""
        header, fds, _, _ = socket.recv_fds(self._inbox, HEADER_BYTES, 1)
        return header, _mapped(fds[0]) if fds else np.empty(0, np.uint8)

    def close(self) -> None:
        for each in (self._inbox, *self._outboxes):
            each.close()


def _memfd(data: Sequence[npt.NDArray[np.uint8]]) -> int:
    """A memfd with these bytes, at least one."""
    fd = os.memfd_create("stencil-value", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(1, sum(each.size for each in data)))
        for each in data:
            view = each.data
            while len(view):
                view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mapped(fd: int) -> npt.NDArray[np.uint8]:
    """The bytes of a memfd, whose descriptor is closed. The mapping lives as long as the array."""
    try:
        return np.frombuffer(mmap.mmap(fd, 0), np.uint8)
    finally:
        os.close(fd)

"""Channel: byte frames between two processes, through a ring in shared memory each way, with a socketpair for wake-ups.

Nothing polls. A sender publishes its frame in the ring and then writes one byte to the socket; a receiver drains the
ring, then sleeps on the socket. EOF on the socket means that the peer is gone. No wake-up can be lost: a frame is
published before its byte is sent, and a receiver that has taken bytes off the socket always checks the ring again
before it sleeps, so the byte of a frame that it missed is still waiting.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import ExitStack

from core.errors import EngineError

_HEADER = 128  # bytes before the data: two cache lines, so that the two writers do not share one
_TAIL, _HEAD = 0, 8  # positions of the counters, in units of 8 bytes
_LENGTH = 8  # bytes of a frame's length field; frames are multiples of it, so the field never wraps
_CAPACITY = 1024 * 1024
_WAKE = b"\0"
_MAX_WAKES = 4096  # wake bytes taken at once; remaining ones only cause another check of the ring


class ChannelFullError(EngineError):
    """The ring has no room for a frame because the peer does not read. The frame was not sent."""


class PeerClosedError(EngineError):
    """The process at the other end is gone or has closed its channel."""


class Ring:
    """Frames from one producer to one consumer, in zero-initialised shared memory.

        byte 0        8          64       72         128                                    128 + capacity
        | tail: u64 | (unused) | head: u64 | (unused) | data ...                              |
          producer's             consumer's

        data, at counter modulo capacity:      head            tail
                                    | free      | frame | frame | free                        |
        frame:  | length: u64 | payload, zero to seven bytes of padding |    may wrap at the end of the data

    tail and head count all bytes ever written and read; they only grow. tail - head is the number of unread bytes: 0 in
    an empty ring, and never above the capacity. Each counter has one writer.

    Order of stores. The producer writes the frame, then tail; the consumer reads tail, then the frame, then writes
    head. A producer killed in between has published nothing. A counter is written as one aligned 8-byte store
    (`memoryview.cast("Q")` copies an item with a memcpy of constant size, which compiles to one move).
    x86 keeps this order in hardware. arm64 does not, and Python has no fence, so `_fence` is called between the steps.
    For most frames the system calls that send and receive their wake byte guarantee the order as well.
    """

    def __init__(self, memory: memoryview) -> None:
        """memory: `Ring.nbytes(capacity)` bytes, 8-byte aligned, all zeros when the first of the two ends is made."""
        self._counters = memory[:_HEADER].cast("Q")
        self._data = memory[_HEADER:]
        self.capacity = len(self._data)
        self._lengths = self._data.cast("Q")
        self._lock = threading.Lock()
        self._lock.acquire()

    @staticmethod
    def nbytes(capacity: int) -> int:
        """Bytes of memory for a ring of `capacity` bytes of frames, a positive multiple of 8."""
        if capacity <= 0 or capacity % _LENGTH:
            raise ValueError(f"a ring's capacity must be a positive multiple of {_LENGTH}, not {capacity}")
        return _HEADER + capacity

    def push(self, payload: bytes) -> bool:
        """Publish one frame; False if there is no room now. ValueError if it could never fit. Producer only."""
        size = _frame_size(payload)
        if size > self.capacity:
            raise ValueError(f"a frame of {len(payload)} bytes does not fit into a ring of {self.capacity} bytes")
        tail = self._counters[_TAIL]
        if tail - self._counters[_HEAD] + size > self.capacity:
            return False
        self._fence()  # the consumer has read what is about to be overwritten
        self._write(tail % self.capacity, payload)
        self._fence()  # the frame before the counter that publishes it
        self._counters[_TAIL] = tail + size
        self._fence()  # the counter before the wake-up that announces it, or that is skipped because the socket is full
        return True

    def pop(self) -> bytes | None:
        """Remove and return the oldest frame; None if the ring is empty. Consumer only."""
        self._fence()  # the wake-up before the counter
        head = self._counters[_HEAD]
        if self._counters[_TAIL] == head:
            return None
        self._fence()  # the counter before the frame that it publishes
        payload = self._read(head % self.capacity)
        self._fence()  # the last read of the frame before its room is given back
        self._counters[_HEAD] = head + _frame_size(payload)
        return payload

    def release(self) -> None:
        """Release the memory, so that it can be unmapped."""
        for view in (self._counters, self._lengths, self._data):
            view.release()

    def _write(self, at: int, payload: bytes) -> None:
        self._lengths[at // _LENGTH] = len(payload)
        at = (at + _LENGTH) % self.capacity
        first = min(len(payload), self.capacity - at)
        self._data[at : at + first] = payload[:first]
        self._data[: len(payload) - first] = payload[first:]

    def _read(self, at: int) -> bytes:
        length = self._lengths[at // _LENGTH]
        at = (at + _LENGTH) % self.capacity
        first = min(length, self.capacity - at)
        return b"".join((self._data[at : at + first], self._data[: length - first]))

    def _fence(self) -> None:
        """Order all loads and stores before the call before those after it; about 0.1 us.

        An uncontended lock, released and taken again: a release operation followed by an acquire operation. On arm64 an
        acquire may not pass an earlier release, so nothing passes the pair; on x86 each is a locked instruction, a full
        fence.
        """
        self._lock.release()
        self._lock.acquire()


class Channel:
    """One end of a two-way connection: two rings in one memfd, and a socketpair for wake bytes and EOF.

        memfd:   | ring: creator to attacher | ring: attacher to creator |

    Every receiving call takes wake bytes off the socket: do not use `messages` and `recv` at the same time.
    Not thread-safe, except that one thread may send while another receives.
    """

    def __init__(self, memfd: int, sock: socket.socket, *, creator: bool) -> None:
        """Map the rings and own `sock`. Use `create` or `attach`."""
        self._mmap = mmap.mmap(memfd, 0)
        self._memory = memoryview(self._mmap)
        half = len(self._memory) // 2
        rings = Ring(self._memory[:half]), Ring(self._memory[half:])
        self._outgoing, self._incoming = rings if creator else rings[::-1]
        self._sock = sock
        self._peer_gone = False
        self._closed = False
        self._child_fds: tuple[tuple[int, int], ...] = ()  # (descriptor, inode) while the creator may still hold them
        self._loop: asyncio.AbstractEventLoop | None = None  # where `messages` watches the socket
        self._woken = asyncio.Event()

    @classmethod
    def create(cls, capacity: int = _CAPACITY) -> tuple[Channel, tuple[int, int]]:
        """A new channel: this end, and the descriptors (memfd, socket) that a child attaches to.

        capacity: bytes each way, a multiple of 8. The parent must close its copy of the child's socket after the child
        has started, or a death is never seen: `core.ipc.process.spawn` does, others call `close_child_fds`. Raises
        OSError, and leaves nothing open, if there is no memory or this process may open no more.
        """
        with ExitStack() as undo:
            memfd = os.memfd_create("stencil-ring", os.MFD_CLOEXEC)
            undo.callback(os.close, memfd)
            os.ftruncate(memfd, 2 * Ring.nbytes(capacity))
            ours, theirs = map(undo.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
            channel = cls(memfd, ours, creator=True)
            undo.pop_all()
        fds = memfd, theirs.detach()
        channel._child_fds = tuple((fd, os.fstat(fd).st_ino) for fd in fds)
        return channel, fds

    @classmethod
    def attach(cls, memfd: int, sock_fd: int) -> Channel:
        """The other end, made from the descriptors that `create` returned, which it then owns."""
        # Under a new number, since the creator may be in the same process, and closes the old one.
        channel = cls(memfd, socket.socket(fileno=os.dup(sock_fd)), creator=False)
        os.close(memfd)  # the mapping keeps the memory
        os.close(sock_fd)
        return channel

    def close_child_fds(self) -> None:
        """Close this process's copies of the child's descriptors unless that has been done."""
        for fd, inode in self._child_fds:
            if _is_open(fd, inode):
                os.close(fd)
        self._child_fds = ()

    def send(self, payload: bytes) -> None:
        """Send one frame to the peer; never blocks.

        Raises ChannelFullError if the ring has no room, ValueError if the frame is larger than the ring,
        PeerClosedError if the peer is gone.
        """
        if self._peer_gone or self._closed:
            raise PeerClosedError("the channel is closed")
        if not self._outgoing.push(payload):
            raise ChannelFullError(f"no room for {len(payload)} bytes: the peer does not read")
        try:
            self._sock.send(_WAKE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            pass  # the socket is full of wake bytes; the peer will check the ring after it has taken them
        except OSError as error:
            raise PeerClosedError("the peer is gone") from error

    def recv(self) -> bytes:
        """Wait for the next frame. PeerClosedError once the peer is gone and all its frames are taken."""
        while (payload := self._incoming.pop()) is None:
            self._take_wakes(0)
            if self._peer_gone:
                return self._last_frames()
        return payload

    def take(self) -> bytes | None:
        """The next frame, if it has come; its wake byte stays in the socket and only causes another check."""
        return self._incoming.pop()

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Every frame as it arrives; ends once the peer is gone and all its frames are taken, or the channel is closed.

        Watches the socket with the running loop's `add_reader` (asyncio or uvloop). Only one iteration at a time. Does
        not yield to the loop between frames that are already there.
        """
        self._watch(asyncio.get_running_loop())
        try:
            while not self._closed:
                self._woken.clear()
                while not self._closed and (payload := self._incoming.pop()) is not None:
                    yield payload
                if self._peer_gone:
                    return  # known before the last check of the ring: no frame can follow
                await self._woken.wait()
        finally:
            self._unwatch()

    def close(self) -> None:
        """Close this end: the peer sees EOF, `messages` ends. Frames not yet taken are lost. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        self._woken.set()
        self._sock.close()
        self.close_child_fds()
        self._outgoing.release()
        self._incoming.release()
        self._memory.release()
        self._mmap.close()

    def _last_frames(self) -> bytes:
        """The next frame that a dead peer has left in the ring. It published all of them before its socket closed."""
        if (payload := self._incoming.pop()) is None:
            raise PeerClosedError("the peer is gone")
        return payload

    def _take_wakes(self, flags: int) -> bool:
        """Take all wake bytes (with flags=0, wait for one) and notice EOF; whether there may be more."""
        if self._peer_gone:
            return False
        try:
            self._peer_gone = not self._sock.recv(_MAX_WAKES, flags)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the peer left without taking all of our wake bytes
            self._peer_gone = True
        return not self._peer_gone

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None:
            raise RuntimeError("messages() is already being iterated")
        self._loop = loop
        loop.add_reader(self._sock.fileno(), self._on_readable)

    def _unwatch(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._loop = None

    def _on_readable(self) -> None:
        """Empty the socket here, not in `messages`: a level-triggered reader would spin while a frame is processed.

        Completely: if wake bytes and a reset arrive together, libuv calls this only once, and the end of the peer would
        go unnoticed.
        """
        while self._take_wakes(socket.MSG_DONTWAIT):
            pass
        if self._peer_gone and self._loop is not None:
            self._loop.remove_reader(self._sock.fileno())  # EOF stays readable for ever
        self._woken.set()


def _frame_size(payload: bytes) -> int:
    """Bytes that a frame takes in the ring: length field, payload, padding."""
    return _LENGTH - (-len(payload) // _LENGTH) * _LENGTH


def _is_open(fd: int, inode: int) -> bool:
    """Whether `fd` is still the file with this inode; the number may have been closed and reused since."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False

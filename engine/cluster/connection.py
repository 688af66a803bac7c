"""Connection: one end of what joins an API server and an engine of another machine: messages, and arrays beside them.

Messages have a link of their own, so that none waits behind megabytes. Arrays go in chunks over two others, since one
connection encrypts at most 0.3 to 0.6 GB/s; what is under way is limited, and the other end takes it where it wants it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from core.errors import MessageError
from engine.cluster.link import Buffer, Frames, Link
from engine.cluster.pace import Pace
from engine.engine_core.watchdog import SilenceWatch

CHUNK_BYTES = 512 * 1024
"""Of an array: small enough that a link's loss costs little, large enough that headers do not count."""

WINDOW_BYTES = 4 * 1024**2
"""Most bytes that are under way on a link of arrays."""

KEPT_BYTES = 4 * WINDOW_BYTES
"""Of freed memory that a process with connections keeps for the next chunks."""

MESSAGES, *ARRAYS = LINKS = b"messages", b"arrays-0", b"arrays-1"
"""Names of the links."""

BEAT_SECONDS = 0.5


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """What comes before the bytes of a part of an array."""

    request_id: str
    offset: int  # of the array in the API server's arena, which is its name
    total: int  # bytes of the array
    start: int  # of this part


class Peer(Protocol):
    """What a connection's owner does with what comes. Its methods must not block; they raise MessageError for what the
    other end cannot have sent. Nothing that comes after that is to be taken: it is not known what is missing."""

    def on_message(self, frames: Sequence[bytes]) -> None:
        """A message has come; those of one end come in order."""

    def place(self, request_id: str, offset: int, total: int) -> npt.NDArray[np.uint8]:
        """Memory for an array that comes, [total]. Raises OutOfMemoryError if there is none."""

    def on_array(self, request_id: str, offset: int) -> None:
        """All of an array has come."""

    def on_silence(self) -> None:
        """Nothing has come for a while."""


class Connection:
    """Run `run` as a task while the sockets are open. Each end has one per engine and epoch."""

    def __init__(
        self, epoch: int, peer: Peer, transmit: Callable[[bytes, Frames], None], silence_seconds: float
    ) -> None:
        """transmit: sends a message of the link with this name, see `Link`. silence_seconds: without a word of the
        other end, after which its owner is told; counted from `run` on."""
        self._peer = peer
        self._links = {name: Link(epoch, partial(transmit, name)) for name in LINKS}
        self._arrays = [self._links[name] for name in ARRAYS]
        self._turns = cycle(self._arrays)
        self._pace = Pace()
        self._has_room = asyncio.Event()
        self._missing: dict[tuple[str, int], int] = {}  # array -> bytes that have not come
        self._silence = SilenceWatch(silence_seconds, peer.on_silence)
        self._decoder = msgspec.msgpack.Decoder(Chunk)

    @property
    def unanswered_bytes(self) -> int:
        """Of all that the other end is not known to have."""
        return sum(link.unanswered_bytes for link in self._links.values())

    @property
    def byte_seconds(self) -> float:
        """Seconds that a byte of an array takes, see Pace."""
        return self._pace.byte_seconds

    async def run(self) -> None:
        """Beat until cancelled."""
        self._silence.note_message()  # who is never heard is as silent as who has become so
        try:
            while True:
                for link in self._links.values():
                    link.beat()
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            self._silence.close()

    def send(self, *frames: bytes) -> None:
        """Send a message."""
        self._links[MESSAGES].send(*frames)

    async def send_array(self, request_id: str, offset: int, array: npt.NDArray[Any]) -> None:
        """Send a copy of an array, which may change once this returns. offset: its name, see `Chunk`."""
        content = array.reshape(-1).view(np.uint8)
        for start in range(0, len(content), CHUNK_BYTES):
            link = await self._link_with_room()
            if not any(each.unanswered_bytes for each in self._arrays):
                self._pace.begin(time.monotonic())
            header = msgspec.msgpack.encode(Chunk(request_id, offset, len(content), start))
            link.send(header, zmq.Frame(content[start : start + CHUNK_BYTES], copy=True))
            await asyncio.sleep(0)

    async def _link_with_room(self) -> Link:
        while True:
            for _ in ARRAYS:
                link = next(self._turns)
                if link.unanswered_bytes < WINDOW_BYTES:
                    return link
            self._has_room.clear()
            await self._has_room.wait()

    def receive(self, name: bytes, frames: Sequence[Buffer]) -> None:
        """Take what has come over a link. Raises as Peer's methods."""
        link = self._links.get(name)
        if link is None:
            raise MessageError(f"there is no link {name!r}")
        unanswered = link.unanswered_bytes
        content = link.receive(frames)
        self._silence.note_message()
        if name == MESSAGES:
            if content is not None:
                self._peer.on_message([*map(bytes, content)])
            return
        if (answered := unanswered - link.unanswered_bytes) > 0:
            self._pace.note_answered(answered, time.monotonic())
        if content is not None:
            self._take_chunk(content)
            link.answer()
        self._has_room.set()

    def _take_chunk(self, content: Sequence[Buffer]) -> None:
        try:
            chunk, data = self._decoder.decode(content[0]), np.frombuffer(content[1], np.uint8)
        except (msgspec.DecodeError, IndexError, ValueError) as error:
            raise MessageError(f"a part of an array cannot be decoded: {error}") from error
        key = chunk.request_id, chunk.offset
        place = self._peer.place(chunk.request_id, chunk.offset, chunk.total)
        if not 0 <= chunk.start <= chunk.start + len(data) <= len(place) == chunk.total:
            raise MessageError(f"a part of an array of {chunk.total} bytes does not fit")
        place[chunk.start : chunk.start + len(data)] = data
        missing = self._missing.pop(key, chunk.total) - len(data)
        if missing > 0:
            self._missing[key] = missing
        else:
            self._peer.on_array(chunk.request_id, chunk.offset)

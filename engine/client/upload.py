"""Upload: an encoded file, read in small pieces so that copying it to shared memory does not block the event loop."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

CHUNK_BYTES = 256 * 1024
"""Bytes copied per turn of the event loop: about 0.1 ms of memcpy and page faults."""


class Upload(Protocol):
    """A file of known size, read in pieces of at most CHUNK_BYTES."""

    @property
    def size(self) -> int: ...

    def chunks(self) -> AsyncIterator[bytes | memoryview]: ...


class BytesUpload:
    """A file that is already in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    @property
    def size(self) -> int:
        return self._data.nbytes

    async def chunks(self) -> AsyncIterator[memoryview]:
        for start in range(0, self.size, CHUNK_BYTES):
            yield self._data[start : start + CHUNK_BYTES]


class KeptUpload:
    """A copy of a file, kept in pieces, so that none takes long to copy or to free."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = tuple(pieces)
        self.size = sum(map(len, self._pieces))

    @classmethod
    async def of(cls, upload: Upload) -> KeptUpload:
        """A copy of an upload."""
        return cls([bytes(chunk) async for chunk in upload.chunks()])

    @classmethod
    async def of_output(cls, data: memoryview, *, is_base64: bool) -> KeptUpload:
        """A copy of an encoded file in shared memory, decoded first if it is base64 text. Yields to the event loop
        between pieces.
        """
        pieces = []
        for start in range(0, data.nbytes, CHUNK_BYTES):  # a multiple of 4 characters each
            piece = data[start : start + CHUNK_BYTES]
            pieces.append(binascii.a2b_base64(piece) if is_base64 else bytes(piece))
            await asyncio.sleep(0)
        return cls(pieces)

    def is_like(self, other: KeptUpload) -> bool:
        """Whether both have the same content, in the same pieces."""
        return self.size == other.size and self._pieces == other._pieces

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece

"""ClientArena: the API server's shared memory for uploads, pixels and encoded files."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy.typing as npt

from core.handles import ArrayRef
from core.ipc.shared_array import Arena, ArenaAllocator

RELEASE_BYTES = 2 * 1024 * 1024
"""Bytes given back to the kernel per turn of the event loop: about 0.7 ms of work. A multiple of the page size."""


class ClientArena:
    """An arena with its allocator. shared: the arena itself, for the other processes that map it."""

    def __init__(self, size: int) -> None:
        """size: bytes of address space. Raises ConfigError if the system cannot provide it."""
        self.shared = Arena.create(0, size)
        self._allocator = ArenaAllocator(self.shared)

    @property
    def used_bytes(self) -> int:
        """Bytes of all regions, rounding included."""
        return self._allocator.used_bytes

    def view(self, ref: ArrayRef) -> npt.NDArray[Any]:
        """The array behind a handle, without a copy."""
        return self.shared.view(ref)

    def alloc(self, nbytes: int) -> ArrayRef:
        """Allocate a region, uint8 [nbytes], content undefined. Raises OutOfMemoryError if there is no room."""
        return self._allocator.alloc(nbytes)

    def trim(self, region: ArrayRef, nbytes: int) -> ArrayRef:
        """Free all of a region but its first `nbytes`; the handle returned replaces `region`."""
        return self._allocator.trim(region, nbytes)

    def free(self, region: ArrayRef) -> None:
        """Free a region at once: of a few MB, this takes a ms."""
        self._allocator.free(region)

    async def release(self, region: ArrayRef) -> None:
        """Free a region, giving its memory back to the kernel piece by piece: 36 MB at once take 12 ms."""
        for start in range(region.offset, region.offset + region.size - RELEASE_BYTES, RELEASE_BYTES):
            self.shared.release_pages(start, start + RELEASE_BYTES)
            await asyncio.sleep(0)
        self._allocator.free(region)

    def check_integrity(self) -> None:
        """Raise AssertionError unless regions and free ranges tile the arena."""
        self._allocator.check_integrity()

    def close(self) -> None:
        """Refuse new views; the kernel frees the memory with the last process that maps it."""
        self.shared.close()

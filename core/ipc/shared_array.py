"""Arrays in shared memory: arenas, and handles to their parts that messages carry instead of copies.

An arena is one memfd, mapped completely by every process that has its descriptor. It has no name, so nothing can be
left behind: the kernel frees it with the last process. Its size is only address space; a page of memory is taken when
first written and returned when its last byte is freed.

    0                                                                    size
    |  chunk  |  free  | chunk | chunk |            free                 |
       ^ ArrayRef(arena, offset, shape, dtype)        ^ pages here hold no memory

One process, the owner, allocates (`ArenaAllocator`); the others only access arrays by handles (`Arena.view`) and make
handles to parts of them (`carve`).
"""

from __future__ import annotations

import mmap
import os
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError, OutOfMemoryError
from core.free_list import FreeList, round_up
from core.handles import ArrayRef

_MAP_NORESERVE = 0x4000  # Linux on x86-64 and arm64; the mmap module of Python 3.11 has no name for it


class ArenaFd(NamedTuple):
    """An arena to pass to another process."""

    id: int
    fd: int


class Arena:
    """One shared memory area as mapped by one process. Made by `create` or `attach`."""

    def __init__(self, arena_id: int, fd: int) -> None:
        """Map `fd`, which this object then owns."""
        self.id = arena_id
        self.fd = fd
        self.size = os.fstat(fd).st_size
        memory = mmap.mmap(fd, self.size, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        self._mmap: mmap.mmap | None = memory
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)

    @classmethod
    def create(cls, arena_id: int, size: int) -> Arena:
        """A new arena of `size` bytes (> 0) of zeros, which takes no memory yet. Raises ConfigError if the system
        cannot map it.
        """
        if size <= 0:
            raise ValueError(f"an arena needs a positive size, not {size}")
        fd = os.memfd_create(f"stencil-arena-{arena_id}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            return cls(arena_id, fd)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"cannot map {size} bytes of shared memory: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, arena_id: int, fd: int) -> Arena:
        """The arena of an inherited descriptor, which the Arena then owns."""
        return cls(arena_id, fd)

    @property
    def handle(self) -> ArenaFd:
        """What another process needs to attach it."""
        return ArenaFd(self.id, self.fd)

    def view(self, ref: ArrayRef) -> npt.NDArray[Any]:
        """The array that `ref` refers to, writable and without a copy; it keeps the memory mapped while it exists.

        Raises ValueError if the handle is for another arena, exceeds this one, is misaligned or has no plain dtype.
        """
        if self._mmap is None:
            raise ValueError(f"arena {self.id} is closed")
        if ref.arena != self.id:
            raise ValueError(f"a handle on arena {ref.arena} was given to arena {self.id}")
        end = ref.offset + array_bytes(ref)
        if ref.offset < 0 or end > self.size:
            raise ValueError(f"bytes {ref.offset}..{end} lie outside arena {self.id} of {self.size} bytes")
        return self._bytes[ref.offset : end].view(ref.dtype).reshape(ref.shape)

    def release_pages(self, start: int, end: int) -> None:
        """Return the memory of the whole pages in bytes [start, end) to the kernel; they then read as zeros."""
        first = round_up(start, mmap.PAGESIZE)
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            # On a memfd MADV_REMOVE is fallocate(PUNCH_HOLE): it affects all processes; the size is unchanged.
            self._mapping.madvise(mmap.MADV_REMOVE, first, last - first)

    def close(self) -> None:
        """Close the descriptor and refuse new views. The mapping itself ends with the last view of it."""
        if self._mmap is not None:
            self._mmap = None
            self._bytes = np.empty(0, np.uint8)
            os.close(self.fd)

    @property
    def _mapping(self) -> mmap.mmap:
        if self._mmap is None:
            raise ValueError(f"arena {self.id} is closed")
        return self._mmap


class ArenaAllocator:
    """Allocates chunks of an arena. Used only in the process that owns the arena; not thread-safe.

    Places come from a `FreeList`: first fit in address order, aligned to 64 bytes, large chunks to memory pages.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free = FreeList(arena.size, mmap.PAGESIZE)
        self._used: dict[int, tuple[int, ArrayRef]] = {}  # start of a chunk -> (its end, the handle given out)

    @property
    def used_bytes(self) -> int:
        """Bytes of all chunks, rounding included."""
        return self._free.used_bytes

    def alloc(self, nbytes: int) -> ArrayRef:
        """A chunk of at least `nbytes` > 0, as uint8 [nbytes]; its content is undefined.

        Aligned to 64 bytes; from 16 pages on, to a page. Raises OutOfMemoryError if no free range is long enough.
        """
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        start = self._free.alloc(nbytes)
        if start is None:
            state = f"{self.used_bytes} of {self._arena.size} bytes used"
            raise OutOfMemoryError(f"shared arena {self._arena.id} has no room for {nbytes} bytes ({state})")
        ref = ArrayRef(self._arena.id, start, (nbytes,), "uint8")
        self._used[start] = (start + self._free.extent(nbytes), ref)
        return ref

    def free(self, ref: ArrayRef) -> None:
        """Free a chunk and return its memory to the kernel. `ref` must be exactly what `alloc` or `trim` returned.

        Raises ValueError for anything else: a second free, a carved handle, another arena's.
        """
        end, given = self._used.get(ref.offset, (0, None))
        if ref != given:
            raise ValueError(f"{ref} is not allocated")
        del self._used[ref.offset]
        self._release(ref.offset, end, *self._free.free(ref.offset, end))

    def trim(self, ref: ArrayRef, nbytes: int) -> ArrayRef:
        """Shorten a chunk to its first `nbytes` > 0; the handle returned replaces `ref`. ValueError as for `free`."""
        end, given = self._used.get(ref.offset, (0, None))
        if ref != given or not 0 < nbytes <= ref.size:
            raise ValueError(f"{ref} is not allocated, or cannot be trimmed to {nbytes} bytes")
        kept = ref.offset + round_up(nbytes, self._free.alignment(ref.size))
        shorter = ArrayRef(ref.arena, ref.offset, (nbytes,), ref.dtype)
        self._used[ref.offset] = (kept, shorter)
        if kept < end:
            self._release(kept, end, *self._free.free(kept, end))
        return shorter

    def check_integrity(self) -> None:
        """Raise AssertionError unless chunks and free ranges tile the arena, without adjacent free ranges."""
        self._free.check_integrity((start, end) for start, (end, _) in self._used.items())

    def _release(self, start: int, end: int, free_start: int, free_end: int) -> None:
        """Release the pages that [start, end) touches, except those shared with a chunk outside the free range."""
        first_page = start // mmap.PAGESIZE * mmap.PAGESIZE
        last_page = round_up(end, mmap.PAGESIZE)
        self._arena.release_pages(max(first_page, free_start), min(last_page, free_end))


def carve(region: ArrayRef, offset: int, shape: tuple[int, ...], dtype: str) -> ArrayRef:
    """A handle to a part of `region`: `shape` of `dtype`, starting `offset` bytes into it.

    Raises ValueError if it does not fit, is misaligned for its dtype, or has no plain dtype.
    """
    part = ArrayRef(region.arena, region.offset + offset, shape, dtype)
    if offset < 0 or offset + array_bytes(part) > array_bytes(region):
        raise ValueError(f"{dtype} {shape} at byte {offset} does not fit into a region of {array_bytes(region)} bytes")
    return part


def array_bytes(ref: ArrayRef) -> int:
    """Bytes of an array. Raises ValueError for an invalid shape, dtype or alignment."""
    if any(side < 0 for side in ref.shape):
        raise ValueError(f"negative side in shape {ref.shape}")
    itemsize = _itemsize(ref.dtype)
    if ref.offset % itemsize:
        raise ValueError(f"offset {ref.offset} is not aligned for {ref.dtype}")
    return prod(ref.shape) * itemsize


@cache
def _itemsize(name: str) -> int:
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise ValueError(f"unknown dtype {name!r}") from error
    if dtype.kind not in "biufc" or dtype.name != name:  # no objects, strings, records, foreign byte orders
        raise ValueError(f"dtype {name!r} cannot be shared: use a plain numeric numpy name")
    return dtype.itemsize

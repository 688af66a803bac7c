"""Configures how much freed memory the C library's heap keeps. Only for glibc; no effect elsewhere."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def return_freed_memory() -> None:
    """For a process with occasional large blocks: map blocks of 1 MiB and more, so that freeing returns them to the
    system, and use one heap for all threads.

    By default glibc raises that limit to the largest block freed, up to 32 MiB, and gives each thread a heap: an idle
    image processor kept 93 MB of decoded pixels, an API server 40 MB of read bodies.
    """
    _set({_M_MMAP_THRESHOLD: 1024**2, _M_ARENA_MAX: 1})


def keep_freed_blocks(kept_bytes: int) -> None:
    """For a process through which blocks below 1 MiB pass: let the heap keep up to `kept_bytes` of freed memory. Larger
    blocks are mapped.

    By default glibc returns what is freed at the heap's end, and the next block pays for it page by page: a third of
    the time to receive and decrypt 512 KiB.
    """
    _set({_M_MMAP_THRESHOLD: 1024**2, _M_TRIM_THRESHOLD: kept_bytes})


def keep_freed_memory(kept_bytes: int) -> None:
    """For a process that repeats the same allocations: take blocks below 32 MiB, glibc's limit, from the heap, and let
    the heap keep up to `kept_bytes` of freed memory.

    By default glibc returns an operator's output to the system as soon as it is freed, and the next operator pays for
    it page by page: 7000 page faults and a third of the time to encode 256x256 pixels.
    """
    _set({_M_MMAP_THRESHOLD: 32 * 1024**2, _M_TRIM_THRESHOLD: kept_bytes})


def _set(values: dict[int, int]) -> None:
    with contextlib.suppress(AttributeError):  # other C libraries do not have this function
        libc = ctypes.CDLL(None)
        for option, value in values.items():
            libc.mallopt(option, value)

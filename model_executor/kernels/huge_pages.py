"""Memory for weights in huge pages, 2 MiB each, where the system gives some on request (`madvise`).

A step of few tokens reads all weights once, and a product of few rows takes as long as reading its weights. From pages
of 4 KiB a core reads them at half of the speed: 7 GB/s against 16 (16 rows, AMX), since it looks each page up and
fetches nothing ahead beyond its end.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
"""Bytes asked for at once: most weights are smaller than a huge page, and share them."""

LINE = 64
"""Bytes of a cache line, at which every tensor begins."""


class HugePages:
    """Chunks of memory that tensors share. A chunk is freed with the last of them. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: Callable[[], mmap.mmap | None] = lambda: None  # that the next tensor goes to; its tensors keep it
        self._used = 0  # bytes of it

    def put(self, x: Tensor) -> Tensor:
        """A contiguous copy of x, of a size above 0. Raises MemoryError, as an allocator of tensors does."""
        with self._lock:
            chunk, offset = self._place(x.nbytes)
        copy = torch.frombuffer(chunk, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape)
        return copy.copy_(x)

    def _place(self, size: int) -> tuple[mmap.mmap, int]:
        """Bytes for a tensor: a chunk, and where in it they begin."""
        chunk = self._chunk()
        if chunk is None or self._used + size > len(chunk):
            chunk = _mapped(max(size, CHUNK_BYTES))
            with suppress(AttributeError, OSError):  # systems without huge pages
                chunk.madvise(mmap.MADV_HUGEPAGE)
            self._chunk, self._used = weakref.ref(chunk), 0
        offset, self._used = self._used, self._used + -(-size // LINE) * LINE
        return chunk, offset


def _mapped(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes of weights") from error

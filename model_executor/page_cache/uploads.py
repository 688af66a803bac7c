"""Uploads: the copies to a GPU that are under way together on one stream, and the order of their blocks.

What a step waits for is queued at once: the step has begun, so its order will not change, and its kernels can be queued
too, far ahead of the copies. The entries that it reads take turns block by block, since its first block already needs
one of each. Of all other copies only a few blocks are queued at a time, one entry after the other, so that a step that
begins to wait comes next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from model_executor.page_cache.copy_stream import CopyStream

BLOCKS_AHEAD = 4
"""Blocks queued at a time of what no step waits for: enough that the bus is busy while the thread wakes up, few enough
that a step does not wait long behind them. FLUX's are 26 MB each, half a millisecond."""


@dataclass(slots=True, eq=False)
class PageUpload:
    """One entry on its way to the device."""

    key: str
    host: Tensor  # uint8 [entry bytes], pinned
    device: Tensor  # the same on the device
    block_bytes: int
    ready: torch.Event  # after what computation still does with this device memory
    order: Iterator[int]  # of its blocks; each is chosen when it is queued
    is_awaited: Callable[[], bool]  # whether a step waits for it
    on_queued: Callable[[int, torch.Event], None]  # called with a block and the event after its copy
    on_end: Callable[[float, Exception | None], None]  # called with the seconds that its blocks took, and why it failed
    num_queued: int = 0  # blocks
    num_copied: int = 0
    seconds: float = 0.0

    @property
    def num_blocks(self) -> int:
        return -(-self.host.nbytes // self.block_bytes)


class Uploads:
    """One I/O thread's uploads, from the first until none is left. Between, the thread may do something else when
    nothing is queued."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._under_way: list[PageUpload] = []  # in the order in which they came
        self._queued: deque[tuple[PageUpload, torch.Event]] = deque()  # blocks, in the stream's order
        self._since = 0.0  # when the first block queued could begin: the one before was copied, or there was none

    def add(self, upload: PageUpload) -> None:
        self._under_way.append(upload)

    @property
    def is_idle(self) -> bool:
        """Whether no block is queued, and no step waits for one that is not."""
        return not self._queued and not any(upload.is_awaited() for upload in self._left())

    def has(self, key: str) -> bool:
        """Whether an entry is on its way."""
        return any(upload.key == key for upload in self._under_way)

    def advance(self, *, awaited_only: bool = False) -> bool:
        """Queue what is to be queued now, and wait until one more block is copied, if one is queued. Returns whether
        any upload is left. awaited_only: queue only what a step waits for."""
        while (upload := self._next(awaited_only)) is not None:
            self._queue_block(upload)
        if self._queued:
            self._finish_block(*self._queued.popleft())
        return bool(self._under_way)

    def drop_waiting(self) -> None:
        """Drop the uploads of which no block is queued yet."""
        self._under_way = [upload for upload in self._under_way if upload.num_queued]

    def _left(self) -> list[PageUpload]:
        """Those with blocks to queue."""
        return [upload for upload in self._under_way if upload.num_queued < upload.num_blocks]

    def _next(self, awaited_only: bool) -> PageUpload | None:
        """Whose block is queued next; None: none for now."""
        left = self._left()
        if awaited := [upload for upload in left if upload.is_awaited()]:
            return min(awaited, key=lambda upload: upload.num_queued)
        return left[0] if left and not awaited_only and len(self._queued) < BLOCKS_AHEAD else None

    def _queue_block(self, upload: PageUpload) -> None:
        if not self._queued:
            self._since = time.monotonic()
        try:
            if not upload.num_queued:
                self._stream.follow(upload.ready)
            index = next(upload.order)
            block = slice(index * upload.block_bytes, (index + 1) * upload.block_bytes)
            event = self._stream.load(upload.host[block], upload.device[block])
        except Exception as error:  # it ends this upload, not the others
            self._fail(upload, error)
            return
        upload.num_queued += 1
        self._queued.append((upload, event))
        upload.on_queued(index, event)

    def _finish_block(self, upload: PageUpload, event: torch.Event) -> None:
        try:
            event.synchronize()
        except Exception as error:
            self._fail(upload, error)
            return
        now = time.monotonic()
        upload.seconds += now - self._since
        self._since = now
        upload.num_copied += 1
        if upload.num_copied == upload.num_blocks:
            self._under_way.remove(upload)
            upload.on_end(upload.seconds, None)

    def _fail(self, upload: PageUpload, error: Exception) -> None:
        with suppress(RuntimeError):  # of a broken device
            self._stream.finish()  # its memory is freed next
        self._queued = deque(pair for pair in self._queued if pair[0] is not upload)
        self._under_way.remove(upload)
        upload.on_end(upload.seconds, error)

"""PageStore: holds a worker's cached pages, and copies them between tiers in a thread while the worker computes.

Host pages are read and written in place, in shared memory; device pages are tensors by key; `page_files.py` has the
files. The engine decides which page lies where and for how long; the store holds, copies and reports.

One I/O thread does the copies in order. A copy to a faster tier can be read before it is complete: `wait_block` returns
once a block has arrived. On a GPU, copies run on their own stream (`copy_stream.py`), where loads that a step waits for
come first (`uploads.py`). Other loads to a GPU come before copies down and what is done on disk, until those get their
turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.errors import PagesLostError
from core.handles import ArrayRef, EntryRef, Tier
from core.messages.worker import PageCopied, PageCopy
from core.page_scheme import template_of
from model_executor.page_cache.copy_stream import CopyStream
from model_executor.page_cache.uploads import PageUpload, Uploads

logger = logging.getLogger("stencil.worker")

Bytes = npt.NDArray[np.uint8]
OnBlock = Callable[[int], None]

MAX_FAILED_LOADS = 1024
"""Failed loads that are remembered, by key, until the entry is created again; if its edit has ended, that never
happens."""

BLOCKS_BEFORE_OTHERS = 256
"""Blocks loaded to a GPU that no step waits for, after which the oldest other job has its turn: about what an edit with
FLUX reads, a tenth of a second. Such a job may take seconds, and loads wait meanwhile; but an edit may wait for it."""


class PageArena(Protocol):
    """The part of `core.ipc.shared_array.Arena` that the store uses."""

    id: int
    size: int  # bytes

    def view(self, ref: ArrayRef) -> npt.NDArray[np.generic]:
        """The array of a handle, writable, without a copy."""


class Files(Protocol):
    """The part of `page_files.PageFiles` that the store uses."""

    def read(self, key: str, out: Bytes, block_bytes: int, on_block: OnBlock, order: Iterable[int] = ()) -> bool: ...

    def write(self, key: str, data: Bytes, block_bytes: int) -> bool: ...

    def delete(self, key: str) -> None: ...

    def delete_template(self, template_key: str) -> None: ...


@dataclass(slots=True)
class _PageLoad:
    """A copy to a faster tier. Guarded by the store's condition."""

    target: Tier
    last: Collection[int] = ()  # blocks to copy after all others
    arrived: set[int] = field(default_factory=set)  # blocks that are copied, or queued on the device
    events: dict[int, torch.Event] = field(default_factory=dict)  # arrived block -> what the device must wait for
    has_failed: bool = False
    is_awaited: bool = False  # a step has begun to wait for it, so the order of its blocks will not change


@dataclass(frozen=True, slots=True)
class _Job:
    """A copy to do, with what the I/O thread needs for it."""

    copy: PageCopy
    load: _PageLoad | None  # None for a copy to a slower tier
    device: Tensor | None  # the entry in device memory, if that is source or target
    ready: torch.Event | None  # recorded after the work that the device must finish before

    @property
    def is_load(self) -> bool:
        """Whether it goes from host to device."""
        return (self.copy.source, self.copy.target) == ("host", "device")


KEPT_VIEWS = 256
"""Entries of the host tier that need no new view when they are read again, as in the next step."""


class PageStore:
    """Holds entries by key. Its public methods are called by the one thread that computes."""

    def __init__(
        self,
        device: torch.device,
        pages: PageArena,
        files: Files | None,
        on_copied: Callable[[PageCopied], None],
        rank: int = 0,
        *,
        has_device_tier: bool = True,
    ) -> None:
        """pages: the page arena. files: None without a disk tier. on_copied: called once for every copy that was
        started, from the I/O thread, as it ends: in their order, but for loads to a GPU, which overtake other entries'
        copies, if not forever, and each other. Not called for those still queued when the store is closed.
        has_device_tier: whether a GPU's memory may hold pages; the arena is then pinned. Raises ConfigError if pinning
        fails."""
        self._device = device
        self._pages = pages
        self._files = files
        self._on_copied = on_copied
        self._rank = rank
        view = pages.view  # not this object's, which would then refer to itself
        self._view = lru_cache(KEPT_VIEWS)(lambda ref: torch.from_numpy(view(ref)))
        self._tensors: dict[str, Tensor] = {}  # key -> uint8 [nbytes] in device memory
        self._loads: dict[str, list[_PageLoad]] = {}  # key -> under way, or failed
        self._announced: list[_PageLoad] = []  # what the next step reads, until it waits for a block
        self._num_ahead = 0  # blocks loaded to a GPU that no step waited for, since another job; the I/O thread's
        self._changed = threading.Condition()
        self._is_closed = False
        self._jobs: deque[_Job | Sequence[str]] = deque()  # guarded by the condition
        is_pinned = device.type == "cuda" and has_device_tier
        self._stream = CopyStream(device, self._whole_arena()) if is_pinned else None
        self._thread = threading.Thread(target=self._run, name="page-io", daemon=True)
        self._thread.start()

    def entry(self, ref: EntryRef) -> Tensor:
        """An entry to read, uint8 [nbytes]: shared memory itself, or the device's tensor.

        Of an entry that is still loading, only blocks for which `wait_block` has returned may be read. Raises KeyError
        for a device entry that is not here, which is a bug in the plan, and PagesLostError for one whose load failed.
        """
        if ref.host is not None:
            return self._view(ref.host)
        tensor = self._tensors.get(ref.key)
        if tensor is None and ref.key in self._loads:
            raise PagesLostError(f"pages {ref.key} did not arrive")
        if tensor is None:
            raise KeyError(f"rank {self._rank} holds no pages {ref.key} in device memory")
        return tensor

    def on_device(self, ref: EntryRef) -> Tensor:
        """An entry to read, as `entry`, on the device that computes: one of the host tier is copied there, on a CPU
        nothing is.
        """
        return self.entry(ref).to(self._device)

    def create(self, ref: EntryRef) -> Tensor:
        """A new entry to fill, uint8 [nbytes] of undefined content.

        Replaces a device entry of the same key, and forgets failed loads of the key.
        """
        with self._changed:
            self._loads.pop(ref.key, None)
        if ref.host is None:
            self._tensors[ref.key] = torch.empty(ref.nbytes, dtype=torch.uint8, device=self._device)
        return self.entry(ref)

    def start(self, copy: PageCopy) -> None:
        """Start a copy and return at once. A target in device memory exists when this returns, to be waited for.

        Does not raise if the copy is impossible: its PageCopied then has ok=False.
        """
        load = self._expect(copy) if copy.source != "device" and copy.target != "disk" else None
        if copy.target == "device":
            self._make_target(copy)
        ready = self._stream.ready() if self._stream is not None else None
        device = self._tensors.get(copy.key) if "device" in (copy.source, copy.target) else None
        self._put(_Job(copy, load, device, ready))

    def is_loading(self, key: str) -> bool:
        """Whether an entry is being loaded, or its load failed: `wait_block` must be called for its blocks."""
        with self._changed:
            return bool(self._loads.get(key))

    def begin_step(self) -> None:
        """Forget what was announced for a step before: if it failed before it waited for a block, nobody waits."""
        with self._changed:
            self._announced.clear()

    def put_last(self, key: str, blocks: Collection[int]) -> None:
        """Announce that the next step reads an entry, and computes these blocks in full. If the entry is being loaded,
        they are copied after its other blocks, and its blocks in turns with those of the step's other entries.
        """
        with self._changed:
            for load in self._loads.get(key, ()):
                load.last = blocks
                self._announced.append(load)

    def wait_block(self, key: str, block: int) -> None:
        """Wait until a block of an entry may be read; returns at once if the entry is not being loaded.

        Raises PagesLostError if the load failed before this block.
        """
        with self._changed:
            loads = tuple(self._loads.get(key, ()))
            self._note_awaited(loads)
            # All loads in turn: an entry may be copied from disk to host and then on to the device.
            for load in loads:
                self._wait_load(load, block)
                if block not in load.arrived:
                    raise PagesLostError(f"pages {key} did not arrive")
                if self._stream is not None and block in load.events:
                    self._stream.wait(load.events[block])

    def forget(self, keys: Iterable[str]) -> None:
        """Free entries' device memory, if any, and forget their failed loads."""
        with self._changed:
            for key in keys:
                self._tensors.pop(key, None)
                if _has_failed(self._loads.get(key, ())):
                    self._loads.pop(key, None)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove entries' files after the copies started before; a key without "-" means all files of that template."""
        if self._files is not None and keys:
            self._put(tuple(keys))

    def close(self) -> None:
        """Finish the current copies, drop queued ones, end the thread. Waiting `wait_block` calls raise PagesLostError.
        May be called again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _put(self, job: _Job | Sequence[str]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def _note_awaited(self, loads: Iterable[_PageLoad]) -> None:
        """Note that a step has begun to wait for these, and thus for all that were announced."""
        for load in (*loads, *self._announced):
            load.is_awaited = True
        self._announced.clear()

    def _wait_load(self, load: _PageLoad, block: int) -> None:
        self._changed.wait_for(lambda: block in load.arrived or load.has_failed or self._is_closed)

    def _whole_arena(self) -> Tensor:
        return torch.from_numpy(self._host(ArrayRef(self._pages.id, 0, (self._pages.size,), "uint8")))

    def _host(self, ref: ArrayRef) -> Bytes:
        return self._pages.view(ref)  # type: ignore[return-value]  # an entry's handle says uint8

    def _expect(self, copy: PageCopy) -> _PageLoad:
        """Register a load of this entry. Drops earlier failed loads to the same tier; one to the host is kept, since a
        copy that continues from there must fail too."""
        with self._changed:
            loads = [
                load for load in self._loads.get(copy.key, ()) if not load.has_failed or load.target != copy.target
            ]
            self._loads[copy.key] = [*loads, load := _PageLoad(copy.target)]
        return load

    def _make_target(self, copy: PageCopy) -> None:
        try:
            self._tensors[copy.key] = torch.empty(copy.nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError:  # out of memory (a subclass on a GPU, plain on a CPU): the copy will report a failure
            self._tensors.pop(copy.key, None)

    # ------------------------------------------------------------------------------------------------ the I/O thread

    @torch.inference_mode()  # as in the computing thread, whose tensors could not be written otherwise
    def _run(self) -> None:
        try:
            if self._stream is not None:
                self._stream.enter()
            while self._has_job():
                if self._stream is not None and self._next_load() is not None:
                    self._load(Uploads(self._stream))
                else:
                    self._do(self._jobs.popleft())
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    def _has_job(self) -> bool:
        """Wait for a job. False: the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            return not self._is_closed

    def _next_load(self) -> int | None:
        """The place of the first load to the device that is not behind another copy of its entry. It overtakes others'
        copies: no edit waits for what is copied down, which may take seconds, as to a disk."""
        with self._changed:
            before = set[str]()
            for place, job in enumerate(self._jobs):
                if isinstance(job, _Job):
                    if job.is_load and job.copy.key not in before:
                        return place
                    before.add(job.copy.key)
        return None

    def _do(self, job: _Job | Sequence[str]) -> None:
        self._num_ahead = 0
        if isinstance(job, _Job):
            self._copy(job)
        elif self._files is not None:
            for key in job:
                self._delete(self._files, key)

    def _delete(self, files: Files, key: str) -> None:
        if template_of(key) == key:
            files.delete_template(key)
        else:
            files.delete(key)

    def _copy(self, job: _Job) -> None:
        started, is_ok, error = time.monotonic(), False, None
        try:
            is_ok = not self._follows_failure(job) and self._move(job)
        except Exception as raised:  # the thread's outermost handler: waiting readers must be woken
            error = raised
        self._report(job, time.monotonic() - started, error, is_ok=is_ok)

    def _report(self, job: _Job, seconds: float, error: Exception | None = None, *, is_ok: bool = True) -> None:
        """End a copy, and tell of it. error: why it failed, if the log is to say so."""
        copy = job.copy
        if error is not None:
            is_ok, ends = False, (copy.source, copy.target)
            logger.warning("pages %s were not copied from %s to %s", copy.key, *ends, exc_info=error)
        self._end(job, is_ok)
        self._on_copied(PageCopied(self._rank, copy.key, copy.nbytes, copy.source, copy.target, is_ok, seconds))

    def _follows_failure(self, job: _Job) -> bool:
        """Whether the copy's source failed to load."""
        with self._changed:
            loads = self._loads.get(job.copy.key, ())
            return job.copy.source == "host" and any(load.has_failed and load.target == "host" for load in loads)

    def _move(self, job: _Job) -> bool:
        copy, host = job.copy, self._host_side(job.copy)
        match copy.source, copy.target:
            case "disk", "host":
                arrived = self._arrival(job)
                order = self._order(job)
                return self._files is not None and self._files.read(copy.key, host, copy.block_bytes, arrived, order)
            case "host", "disk":
                return self._files is not None and self._files.write(copy.key, host, copy.block_bytes)
            case "host", "device":
                return job.device is not None and self._copy_up(job, host, job.device)
            case "device", "host":
                return job.device is not None and self._copy_down(job, job.device, host)
            case _:
                raise ValueError(f"no such copy: {copy.source} to {copy.target}")

    def _host_side(self, copy: PageCopy) -> Bytes:
        if copy.host is None:
            raise ValueError(f"copies go by way of the host, not from {copy.source} to {copy.target}")
        return self._host(copy.host)

    def _copy_up(self, job: _Job, host: Bytes, device: Tensor) -> bool:
        """Load an entry where the device is a CPU."""
        arrived, nbytes = self._arrival(job), job.copy.block_bytes
        for index in self._order(job):
            start, stop = index * nbytes, (index + 1) * nbytes
            np.copyto(device.numpy()[start:stop], host[start:stop])  # PyTorch would start its threads here too
            arrived(index)
        return True

    def _copy_down(self, job: _Job, device: Tensor, host: Bytes) -> bool:
        if self._stream is None:
            np.copyto(host, device.numpy())
            return True
        assert job.ready is not None
        self._stream.follow(job.ready)
        self._stream.store(device, torch.from_numpy(host))
        return True

    def _load(self, uploads: Uploads) -> None:
        """Load entries to a GPU: those that are to be loaded now, and those that come meanwhile. Between them, do other
        jobs whose turn it is."""
        self._begin_next(uploads)
        while uploads.advance(awaited_only=self._is_turn_of_other(uploads)):
            self._begin_next(uploads)
            if self._is_closed:
                uploads.drop_waiting()
            elif uploads.is_idle and self._is_turn_of_other(uploads):
                self._do(self._jobs.popleft())

    def _is_turn_of_other(self, uploads: Uploads) -> bool:
        """Whether the oldest job that is no load to a GPU is to be done before more is loaded that no step waits for.
        It is not while its own entry is loaded, which was to be done first."""
        if self._num_ahead < BLOCKS_BEFORE_OTHERS:
            return False
        with self._changed:
            if not self._jobs or self._is_closed:
                return False
            job = self._jobs[0]
        return not isinstance(job, _Job) or not (job.is_load or uploads.has(job.copy.key))

    def _begin_next(self, uploads: Uploads) -> None:
        """Jobs are let go of when their upload has ended: they hold device memory."""
        while (place := self._next_load()) is not None:
            with self._changed:
                job = self._jobs[place]
                del self._jobs[place]
            assert isinstance(job, _Job)
            self._begin(uploads, job)

    def _begin(self, uploads: Uploads, job: _Job) -> None:
        """Begin to load an entry to a GPU, unless that cannot succeed."""
        try:
            upload = None if self._follows_failure(job) else self._upload_of(job)
        except Exception as error:  # as in `_copy`
            self._report(job, 0.0, error)
            return
        if upload is None:
            self._report(job, 0.0, is_ok=False)
        else:
            uploads.add(upload)

    def _upload_of(self, job: _Job) -> PageUpload | None:
        """None: there was no device memory for it."""
        host, load, arrived = torch.from_numpy(self._host_side(job.copy)), job.load, self._arrival(job)
        if job.device is None:
            return None
        assert load is not None
        assert job.ready is not None

        def queued(index: int, event: torch.Event) -> None:
            load.events[index] = event
            self._num_ahead += not load.is_awaited
            arrived(index)

        return PageUpload(
            key=job.copy.key,
            host=host,
            device=job.device,
            block_bytes=job.copy.block_bytes,
            ready=job.ready,
            order=self._order(job),
            is_awaited=lambda: load.is_awaited,
            on_queued=queued,
            on_end=partial(self._report, job),
        )

    def _order(self, job: _Job) -> Iterator[int]:
        """The blocks of a load in the order to copy them; each is chosen when the previous one is done."""
        assert job.load is not None
        left = list(range(-(-job.copy.nbytes // job.copy.block_bytes)))
        while left:
            last = job.load.last
            yield left.pop(next((n for n, block in enumerate(left) if block not in last), 0))

    def _arrival(self, job: _Job) -> OnBlock:
        """The callback for each block that has been copied."""

        def arrived(index: int) -> None:
            assert job.load is not None
            with self._changed:
                job.load.arrived.add(index)
                self._changed.notify_all()

        return arrived

    def _end(self, job: _Job, is_ok: bool) -> None:
        """End a load. One that failed is remembered for later `wait_block` calls, until the entry is created again or
        many others have failed since."""
        if job.load is None:
            return
        with self._changed:
            job.load.has_failed = not is_ok
            if not is_ok and job.copy.target == "device":
                self._tensors.pop(job.copy.key, None)
            loads = self._loads.pop(job.copy.key, [])
            if is_ok and job.load in loads:
                loads.remove(job.load)
            if loads:
                self._loads[job.copy.key] = loads  # moved to the end: keys are ordered by last change
            self._forget_old_failures()
            self._changed.notify_all()

    def _forget_old_failures(self) -> None:
        if len(self._loads) > MAX_FAILED_LOADS:
            failed = [key for key, loads in self._loads.items() if _has_failed(loads)]
            for key in failed[:-MAX_FAILED_LOADS]:
                del self._loads[key]


def _has_failed(loads: Sequence[_PageLoad]) -> bool:
    """Whether there are loads, and all of them failed."""
    return bool(loads) and all(load.has_failed for load in loads)

"""Whole runs of FLUX's transformer: all steps of an edit, with pages on the device or copied from host memory.

The keyframes of each step are chosen as in an engine. Rows are made step by step, as the worker makes them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.overlap import Span
from core.cache.page_reservations import bracket
from core.handles import PAGE_ARENA, ArrayRef, EntryRef
from core.ipc.shared_array import Arena
from core.messages.worker import PageCopied, PageCopy
from model_executor.page_cache.page_store import PageStore
from model_executor.page_cache.pages import Pages

ALIGNMENT = 4096
LOADED_AHEAD = 3
"""Keyframes that are on the device or on their way: the two around a step and the next one."""


def exact_run(flux: FluxBench) -> Call:
    """All steps of an edit that computes every token."""
    rows = [flux.at(sigma, flux.row) for sigma in flux.sigmas()]

    def run() -> None:
        for row in rows:
            flux.denoiser.forward([row])

    return run


def resident_run(flux: FluxBench, active: Tensor, entries: Sequence[Tensor]) -> Call:
    """All steps of an edit whose pages are on the device. active: its tokens. entries: of every keyframe, noise
    falling."""
    keyframes = flux.keyframes()
    steps = [(bracket(keyframes, sigma), flux.at(sigma, flux.row)) for sigma in flux.sigmas()]

    def run() -> None:
        for around, row in steps:
            near, *far = (entries[keyframes.index(keyframe)] for keyframe in around.keyframes)
            pages = Pages(flux.layout, flux.size.image_tokens, near, far[0] if far else None, around.weight)
            flux.denoiser.forward([replace(row, active=active, pages=pages)])

    return run


class HostedRun:
    """Steps of edits whose pages are in host memory. As in an engine, loads begin before the picture is encoded, and
    the keyframes around a step are on the device while the next one is copied.

    copies, compute: times on the host, without a GPU's queued work.
    """

    def __init__(self, flux: FluxBench, entries: Sequence[Tensor], bench: Bench, encode: Call) -> None:
        """entries: of every keyframe, noise falling; copied to the host here. encode: the picture."""
        self.copies: list[Span] = []
        self.compute: list[Span] = []
        self._flux, self._bench, self._encode = flux, bench, encode
        keyframes = flux.keyframes()
        self._steps = [(bracket(keyframes, sigma), flux.at(sigma, flux.row)) for sigma in flux.sigmas()]
        room = -(-flux.entry_bytes // ALIGNMENT) * ALIGNMENT
        self._arena = Arena.create(PAGE_ARENA, room * len(entries))
        self._refs = [ArrayRef(PAGE_ARENA, room * n, (flux.entry_bytes,), "uint8") for n in range(len(entries))]
        for ref, entry in zip(self._refs, entries, strict=True):
            torch.from_numpy(self._arena.view(ref)).copy_(entry)
        self._store = PageStore(bench.device, self._arena, None, self._note)

    def run(self, active: Tensor) -> None:
        """Encode a picture and make all steps. active: tokens of the edit."""
        keyframes, num_started = self._flux.keyframes(), 0
        for number in range(LOADED_AHEAD):
            self._start(number)
            num_started += 1
        self._timed(self._encode)
        for around, row in self._steps:
            first = keyframes.index(around.near)
            while num_started < min(first + LOADED_AHEAD, len(self._refs)):
                self._start(num_started)
                num_started += 1
            pages = self._pages([keyframes.index(keyframe) for keyframe in around.keyframes], around.weight)
            step = replace(row, active=active, pages=pages)
            self._timed(partial(self._flux.denoiser.forward, [step]))
            self._store.forget(map(_key, range(first)))
        self._bench.wait()
        self._store.forget(map(_key, range(len(self._refs))))

    def close(self) -> None:
        """End the copies and free the host's memory."""
        self._store.close()
        self._arena.close()

    def _timed(self, call: Call) -> None:
        started = time.monotonic()
        call()
        self.compute.append((started, time.monotonic()))

    def _start(self, number: int) -> None:
        """Start copying a keyframe's pages to the device."""
        block = self._flux.layout.block_bytes(self._flux.size.image_tokens)
        copy = PageCopy(_key(number), self._flux.entry_bytes, block, "host", "device", self._refs[number])
        self._store.start(copy)

    def _pages(self, numbers: Sequence[int], weight: float) -> Pages:
        """The pages of one keyframe, or between two."""
        keys = [_key(number) for number in numbers]
        near, *far = (self._store.entry(EntryRef(key, self._flux.entry_bytes, None)) for key in keys)
        coming = [key for key in keys if self._store.is_loading(key)]
        for key in coming:
            self._store.put_last(key, ())
        wait = partial(self._await, coming) if coming else None
        return Pages(self._flux.layout, self._flux.size.image_tokens, near, far[0] if far else None, weight, wait)

    def _await(self, keys: Sequence[str], block: int) -> None:
        for key in keys:
            self._store.wait_block(key, block)

    def _note(self, copied: PageCopied) -> None:
        ended = time.monotonic()
        self.copies.append((ended - copied.seconds, ended))


def _key(number: int) -> str:
    return f"template-{number}"

"""Whole runs of FLUX's transformer: all steps of an edit, with pages on the device or copied from host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call
from benchmarks.gpu.flux import FluxBench
from benchmarks.gpu.overlap import Span
from core.handles import PAGE_ARENA, ArrayRef, EntryRef
from core.ipc.shared_array import Arena
from core.messages.worker import PageCopied, PageCopy
from model_executor.models.base import Row
from model_executor.page_cache.page_store import PageStore
from model_executor.page_cache.pages import Pages

ALIGNMENT = 4096


def between(sigma: float, keyframes: Sequence[float]) -> tuple[int, float]:
    """(i, weight) with `sigma` = (1 - weight) * keyframe[i] + weight * keyframe[i + 1]; they fall from 1 to 0."""
    for number, (near, far) in enumerate(pairwise(keyframes)):
        if sigma >= far:
            return number, (near - sigma) / (near - far)
    raise ValueError(f"noise level {sigma} lies below all keyframes")


def exact_run(flux: FluxBench) -> Call:
    """All steps of an edit that computes every token."""
    return _run(flux, [flux.at(sigma, flux.row) for sigma in flux.sigmas()])


def resident_run(flux: FluxBench, ratio: float, entries: Sequence[Tensor]) -> Call:
    """All steps of an edit whose pages are on the device. entries: of every keyframe, noise falling."""
    rows = list[Row]()
    for sigma in flux.sigmas():
        interval, weight = between(sigma, flux.keyframes())
        pages = Pages(flux.layout, flux.size.image_tokens, entries[interval], entries[interval + 1], weight)
        rows.append(flux.at(sigma, replace(flux.row, active=flux.box(ratio), pages=pages)))
    return _run(flux, rows)


def _run(flux: FluxBench, rows: Sequence[Row]) -> Call:
    def run() -> None:
        for row in rows:
            flux.denoiser.forward([row])

    return run


class HostedRun:
    """All steps of an edit whose pages are in host memory: as in an engine, the two keyframes around a step are on the
    device while the next one is copied. copies, compute: times on the host, without a GPU's queued work.
    """

    def __init__(self, flux: FluxBench, ratio: float, entries: Sequence[Tensor], bench: Bench) -> None:
        self.copies: list[Span] = []
        self.compute: list[Span] = []
        self._flux, self._bench = flux, bench
        self._steps = [
            (between(sigma, flux.keyframes()), flux.at(sigma, replace(flux.row, active=flux.box(ratio))))
            for sigma in flux.sigmas()
        ]
        room = -(-flux.entry_bytes // ALIGNMENT) * ALIGNMENT
        self._arena = Arena.create(PAGE_ARENA, room * len(entries))
        self._refs = [ArrayRef(PAGE_ARENA, room * n, (flux.entry_bytes,), "uint8") for n in range(len(entries))]
        for ref, entry in zip(self._refs, entries, strict=True):
            torch.from_numpy(self._arena.view(ref)).copy_(entry)
        self._store = PageStore(bench.device, self._arena, None, self._note)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def run(self) -> None:
        num_started = 0
        for (interval, weight), row in self._steps:
            while num_started < min(interval + 3, len(self._refs)):
                self._start(num_started)
                num_started += 1
            started = time.monotonic()
            self._flux.denoiser.forward([replace(row, pages=self._pages(interval, weight))])
            self.compute.append((started, time.monotonic()))
            self._store.forget(map(_key, range(interval)))
        self._bench.wait()
        self._store.forget(map(_key, range(len(self._refs))))

    def close(self) -> None:
        """End the copies and free the host's memory."""
        self._store.close()
        self._arena.close()

    def _start(self, number: int) -> None:
        """Start copying a keyframe's pages to the device."""
        block = self._flux.layout.block_bytes(self._flux.size.image_tokens)
        copy = PageCopy(_key(number), self._flux.entry_bytes, block, "host", "device", self._refs[number])
        self._store.start(copy)

    def _pages(self, interval: int, weight: float) -> Pages:
        keys = [_key(interval), _key(interval + 1)]
        near, far = (self._store.entry(EntryRef(key, self._flux.entry_bytes, None)) for key in keys)
        coming = [key for key in keys if self._store.is_loading(key)]
        for key in coming:
            self._store.put_last(key, ())
        wait = partial(self._await, coming) if coming else None
        return Pages(self._flux.layout, self._flux.size.image_tokens, near, far, weight, wait)

    def _await(self, keys: Sequence[str], block: int) -> None:
        for key in keys:
            self._store.wait_block(key, block)

    def _note(self, copied: PageCopied) -> None:
        ended = time.monotonic()
        self.copies.append((ended - copied.seconds, ended))


def _key(number: int) -> str:
    return f"template-{number}"

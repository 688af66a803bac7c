"""Copies between host and GPU on a stream of their own, beside what is computed.

The page arena is registered with CUDA once, as a whole, so that copies go straight between it and the device. That
takes all of its memory at once and holds it: memory that was given back to the kernel while registered would be read
stale by the device, so an arena that is registered may never give any back (the host tier's does not).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError

BLOCKS_AHEAD = 2
"""Blocks whose copies are queued at a time: enough to keep the bus busy, few enough that a step may still say which
block it needs next."""


class CopyStream:
    """For one I/O thread; the thread that computes calls `ready` and `wait` alone."""

    def __init__(self, device: torch.device, arena: Tensor) -> None:
        """arena: all of the host's memory for pages, uint8; registered until `close`. Raises ConfigError where that
        cannot be."""
        self._device = device
        self._arena = arena
        self._gpu: Any = torch.get_device_module(device)
        self._stream = self._gpu.Stream(device)
        self._register()

    def enter(self) -> None:
        """Once, in the I/O thread: CUDA's current device is each thread's own."""
        self._gpu.set_device(self._stream.device)  # with its number, which `cuda` alone lacks

    def ready(self) -> torch.Event:
        """What the computing thread has queued up to now."""
        event: torch.Event = self._gpu.Event()
        event.record(self._gpu.current_stream(self._device))
        return event

    def wait(self, event: torch.Event) -> None:
        """Have what is queued for computing from now on wait for a copy."""
        self._gpu.current_stream(self._device).wait_event(event)

    def load(
        self,
        host: Tensor,
        device: Tensor,
        block_bytes: int,
        order: Iterable[int],
        ready: torch.Event,
        on_queued: Callable[[int, torch.Event], None],
    ) -> None:
        """Host to device, block by block, after `ready`. on_queued: called when a block's copy is queued, with what
        tells that it is over. Returns when all is done."""
        queued: list[torch.Event] = []
        with self._after(ready):
            for index in order:
                if len(queued) >= BLOCKS_AHEAD:
                    queued[-BLOCKS_AHEAD].synchronize()
                block = slice(index * block_bytes, (index + 1) * block_bytes)
                device[block].copy_(host[block], non_blocking=True)
                queued.append(event := self._gpu.Event(blocking=True))  # a thread that waits for it sleeps
                event.record(self._stream)
                on_queued(index, event)

    def store(self, device: Tensor, host: Tensor, ready: torch.Event) -> None:
        """Device to host, after `ready`. Returns when all is done."""
        with self._after(ready):
            host.copy_(device, non_blocking=True)

    def close(self) -> None:
        """Once the I/O thread has ended. A device that broke may refuse, and then its process ends anyway."""
        self._gpu.cudart().cudaHostUnregister(self._arena.data_ptr())

    def _register(self) -> None:
        nbytes = self._arena.nbytes
        error = self._gpu.cudart().cudaHostRegister(self._arena.data_ptr(), nbytes, 0)
        if int(error):
            raise ConfigError(
                f"CUDA cannot pin {nbytes / 1024**3:.1f} GiB of host memory for cached pages (cudaError "
                f"{int(error)}); give a smaller --cache-host-bytes, 0 for device memory alone"
            )

    @contextmanager
    def _after(self, ready: torch.Event) -> Iterator[None]:
        """Queue copies behind what was computed before; all are done at the end, also of those before a failure."""
        self._stream.wait_event(ready)
        with self._gpu.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

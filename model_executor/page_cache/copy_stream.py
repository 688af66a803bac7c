"""Copies pages between host and GPU on a CUDA stream of their own, in parallel with computing.

The page arena is registered (pinned) with CUDA once, as a whole, so that copies need no staging buffer. This allocates
all of its memory at once. A registered arena must never return memory to the kernel, since the device would then read
stale data; the host tier's arena does not.

Device memory is the computing stream's: allocated and freed there, so it needs no `record_stream`. A copy into an entry
follows `ready`, recorded after its allocation, and thus after all kernels that read what was in that memory before. And
an entry's tensor is held until its copy is over, as the host has seen, whoever forgets it meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError


class CopyStream:
    """A stream for one I/O thread. The computing thread calls only `ready` and `wait`."""

    def __init__(self, device: torch.device, arena: Tensor) -> None:
        """arena: all host memory for pages, uint8; registered with CUDA until `close`. Raises ConfigError if that
        fails."""
        self._device = device
        self._arena = arena
        self._gpu: Any = torch.get_device_module(device)
        self._stream = self._gpu.Stream(device)
        self._register()

    def enter(self) -> None:
        """Call once in the I/O thread: CUDA's current device is per thread."""
        self._gpu.set_device(self._stream.device)  # has an index, unlike `cuda`

    def ready(self) -> torch.Event:
        """An event after all that the computing thread has queued up to now."""
        event: torch.Event = self._gpu.Event()
        event.record(self._gpu.current_stream(self._device))
        return event

    def wait(self, event: torch.Event) -> None:
        """Make computation queued from now on wait for a copy."""
        self._gpu.current_stream(self._device).wait_event(event)

    def follow(self, ready: torch.Event) -> None:
        """Make all copies that are queued from now on wait for an event of `ready`."""
        self._stream.wait_event(ready)

    def load(self, host: Tensor, device: Tensor) -> torch.Event:
        """Queue a copy from host to device; returns the event after it."""
        with self._gpu.stream(self._stream):
            device.copy_(host, non_blocking=True)
        event: torch.Event = self._gpu.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(self._stream)
        return event

    def store(self, device: Tensor, host: Tensor) -> None:
        """Copy device to host. Returns when it is done."""
        try:
            with self._gpu.stream(self._stream):
                host.copy_(device, non_blocking=True)
        finally:
            self.finish()

    def finish(self) -> None:
        """Wait for all copies: memory that one still writes or reads must not be freed."""
        self._stream.synchronize()

    def close(self) -> None:
        """Unregister the arena; call it after the I/O thread has ended. Errors are ignored: on a broken device the
        process is about to end."""
        self._gpu.cudart().cudaHostUnregister(self._arena.data_ptr())

    def _register(self) -> None:
        nbytes = self._arena.nbytes
        error = self._gpu.cudart().cudaHostRegister(self._arena.data_ptr(), nbytes, 0)
        if int(error):
            raise ConfigError(
                f"CUDA cannot pin {nbytes / 1024**3:.1f} GiB of host memory for cached pages (cudaError "
                f"{int(error)}); give a smaller --cache-host-bytes, 0 for device memory alone"
            )

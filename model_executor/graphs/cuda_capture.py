"""Captures work as CUDA graphs that share one pool of memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


class CudaCapture:
    """Captures of one denoiser, on a stream of their own. Its graphs share memory, so one must be done, and its outputs
    copied, before the next is replayed: all run on the computing thread's stream.

    `torch.cuda.graph` does the same, but waits for the device, empties the allocator's cache, and lets what other
    threads do meanwhile (copies of pages, loading) break the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None  # its handle; None: no graph uses one
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.taken_bytes, self.is_broken = 0, False

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        """See `step_graphs.Capture`."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        free = torch.cuda.mem_get_info(self._device)[0]
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException:
                self._end_broken(graph, pool)
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        self._pool = pool
        self.taken_bytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        return graph, outputs

    def _end_broken(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture during which something failed. What failed may have made it invalid: CUDA then refuses to end
        it, and PyTorch leaves its allocator as if it went on."""
        try:
            graph.capture_end()
        except RuntimeError:
            self.is_broken = True
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._index, pool)
                torch._C._cuda_releasePool(self._index, pool)

    def forget(self) -> None:
        """See `step_graphs.Capture`. A pool cannot be used again once no graph does."""
        self._pool, self.taken_bytes = None, 0


def capture_on(device: torch.device) -> CudaCapture | None:
    """Captures for a device; None where there are no CUDA graphs."""
    return CudaCapture(device) if device.type == "cuda" else None

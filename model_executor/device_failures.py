"""Recognises out-of-memory errors of devices, and frees memory before the next attempt."""

from __future__ import annotations

import gc

import torch

from core.errors import OutOfMemoryError

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
"""Wordings of out of memory in plain RuntimeErrors: of PyTorch's CPU allocator, the CUDA driver, cuBLAS and cuDNN."""

NO_ROOM = (
    "the device has no room for this image, even alone: send a smaller one, or have the server hold less at a time "
    "(--max-num-seqs, --cache-device-bytes)"
)


def wait_for_device() -> None:
    """Wait until all queued computation is done; copies of pages, on another stream, continue."""
    if torch.cuda.is_initialized():  # a forked worker, which computes on the CPU, could not initialise it
        torch.cuda.current_stream().synchronize()


def free_memory() -> None:
    """Free unused memory before the next attempt."""
    gc.collect()  # an exception and its traceback, which refers to tensors, may be in a cycle
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    )


def our_error(error: Exception) -> Exception:
    """An OutOfMemoryError for out-of-memory errors; any other error as it is."""
    return OutOfMemoryError(NO_ROOM) if is_out_of_memory(error) else error

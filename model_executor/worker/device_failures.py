"""What a device says when work on it fails, and what can be done before the next attempt."""

from __future__ import annotations

import gc

import torch

from core.errors import OutOfMemoryError

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
"""How it is worded in a plain RuntimeError: by PyTorch's CPU allocator, the CUDA driver, cuBLAS and cuDNN."""

NO_ROOM = (
    "the device has no room for this image, even alone: send a smaller one, or have the server hold less at a time "
    "(--max-num-seqs, --cache-device-bytes)"
)


def wait_for_device() -> None:
    """Until what was queued has been computed. Copies of pages go on."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def free_memory() -> None:
    """Free what can be freed, before the next attempt."""
    gc.collect()  # an exception and its traceback, which holds on to tensors, may be in a cycle
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no room."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    )


def our_error(error: Exception) -> Exception:
    """Out-of-memory errors as ours; any other as it is."""
    return OutOfMemoryError(NO_ROOM) if is_out_of_memory(error) else error

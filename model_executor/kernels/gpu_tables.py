"""Index tables for GPU kernels: which rows belong to which request, and where requests begin. Cached on the device, so
that they are uploaded once for all steps of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from model_executor.kernels.ragged import Span

MAX_TABLES = 64
"""Tables cached on the device: a batch needs up to six for all its steps, of 8 bytes per token each."""


@lru_cache(maxsize=MAX_TABLES)
def table(where: tuple[Span, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row numbers of these spans, one span after the other, and the request of each row, int32 [rows] each."""
    lengths = torch.tensor([stop - start for start, stop in where], device="cpu")  # not on the default device
    rows = torch.cat([torch.arange(*span, dtype=torch.int32, device="cpu") for span in where])
    requests = torch.arange(len(where), dtype=torch.int32, device="cpu").repeat_interleave(lengths)
    return upload(rows, device), upload(requests, device)


@lru_cache(maxsize=MAX_TABLES)
def offsets(where: tuple[Span, ...], device: torch.device) -> Tensor:
    """Starts of these spans, which lie back to back, and the end of the last one: int32 [spans + 1]."""
    starts = [start for start, _ in where] + [where[-1][1]]
    return upload(torch.tensor(starts, dtype=torch.int32, device="cpu"), device)


def longest(where: Sequence[Span]) -> int:
    return max(stop - start for start, stop in where)


def places(rows: Tensor, num_tokens: int) -> Tensor:
    """For each token its index in `rows`, -1 where it is not among them: int32 [tokens]."""
    numbers = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    return torch.full([num_tokens], -1, dtype=torch.int32, device=rows.device).index_copy_(0, rows, numbers)


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, queued behind its current work, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x

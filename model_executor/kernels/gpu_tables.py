"""Numbers of rows and where requests begin, as a GPU's kernels want them: brought there once for a batch's steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from model_executor.kernels.ragged import Span

MAX_TABLES = 64
"""Tables of rows kept on the device: a batch that goes on for many steps needs up to six, of 8 bytes a token each."""


@lru_cache(maxsize=MAX_TABLES)
def table(where: tuple[Span, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of these rows, one span after the other: their numbers and whose they are, int32 [rows] each."""
    lengths = torch.tensor([stop - start for start, stop in where], device="cpu")  # whatever device is the default
    rows = torch.cat([torch.arange(*span, dtype=torch.int32, device="cpu") for span in where])
    requests = torch.arange(len(where), dtype=torch.int32, device="cpu").repeat_interleave(lengths)
    return upload(rows, device), upload(requests, device)


@lru_cache(maxsize=MAX_TABLES)
def offsets(where: tuple[Span, ...], device: torch.device) -> Tensor:
    """Where each of these spans, which lie back to back, begins, and where the last one ends: int32 [spans + 1]."""
    starts = [start for start, _ in where] + [where[-1][1]]
    return upload(torch.tensor(starts, dtype=torch.int32, device="cpu"), device)


def longest(where: Sequence[Span]) -> int:
    return max(stop - start for start, stop in where)


def places(rows: Tensor, num_tokens: int) -> Tensor:
    """Which of these rows each token is, -1 for none: int32 [tokens]."""
    numbers = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    return torch.full([num_tokens], -1, dtype=torch.int32, device=rows.device).index_copy_(0, rows, numbers)


def upload(x: Tensor, device: torch.device) -> Tensor:
    """To the device behind what is queued there, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x

"""A worker process for tests: the real one, which also runs the op TOY."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from workflows import TOY, Toy

from core.graph.op import OPS

if TYPE_CHECKING:
    from core.messages.worker import Item, ItemResult
    from model_executor.worker.ops.context import WorkerContext

PRIME = 1_000_003
SIZE = 1000


def main(config: bytes, fds: list[int]) -> None:
    """Entry point, as `model_executor.worker.main.main`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from model_executor.worker import main as worker
    from model_executor.worker.ops import HANDLERS

    OPS.register(TOY)
    HANDLERS[TOY.name] = run_toys
    worker.main(config, fds)


def run_toys(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Mix all that each item reads into new values. Deferred inputs are read after some work, as they should be."""
    return [_run_toy(context, item) for item in items]


def _run_toy(context: WorkerContext, item: Item) -> ItemResult:
    import torch

    from core.messages.worker import ItemResult

    work = item.work
    assert isinstance(work, Toy)
    mixed = torch.arange(SIZE) + crc32(f"{item.node} {item.version} {work.seed}".encode())
    for ref in sorted(item.inputs, key=lambda ref: (ref.is_deferred, ref.input)):
        if ref.is_deferred:
            time.sleep(0.002)
        mixed += context.read(ref) * crc32(ref.input.encode()) % PRIME
    mixed %= PRIME
    if work.pixels is not None:
        context.shared(work.pixels).view(-1)[:SIZE].copy_(mixed % 256)
    values = context.put(item, {"x": mixed, "y": (mixed * 7 + 1) % PRIME})
    return ItemResult(item.request_id, item.node, values, **work.answer)  # type: ignore[arg-type]

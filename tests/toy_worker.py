"""What workers of tests import as a user's class: with it, they run the op TOY, too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from zlib import crc32

import torch
from workflows import TOY, Toy

from core.graph.op import OPS
from core.messages.worker import Item, ItemResult
from model_executor.worker.ops import HANDLERS
from model_executor.worker.ops.context import WorkerContext

PRIME = 1_000_003
SIZE = 1000


class Toys:
    """To name in EngineConfig: what counts is that its module is imported."""

    def load(self, device: str, dtype: torch.dtype) -> None:
        """Nothing."""

    def execute(self) -> dict[str, object]:
        return {}


def run_toys(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Mix all that each item reads into new values. Deferred inputs are read after some work, as they should be."""
    return [_run_toy(context, item) for item in items]


def _run_toy(context: WorkerContext, item: Item) -> ItemResult:
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


OPS.register(TOY)
HANDLERS[TOY.name] = run_toys

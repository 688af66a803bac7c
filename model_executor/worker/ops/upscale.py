"""Runs the op upscale."""

from __future__ import annotations

from collections.abc import Sequence

from core.messages.worker import Item, ItemResult
from core.scheduling.ops.upscale import Upscale
from model_executor.worker.ops.context import WorkerContext


def upscale(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Interpolate one item's latents to the size of its next pass."""
    (item,) = items
    work, family = item.work, context.models[item.model]
    assert isinstance(work, Upscale)
    (latents,) = (context.read(ref) for ref in item.inputs)
    grid, to_grid = family.grid(work.width, work.height), family.grid(work.to_width, work.to_height)
    tensors = context.put(item, {"latents": family.upscale(latents, grid, to_grid, work.method)})
    return [ItemResult(item.request_id, item.node, tensors)]

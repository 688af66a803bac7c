"""Runs the op decode."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.messages.worker import Item, ItemResult
from core.scheduling.ops.decode import Decode
from model_executor.worker.ops.context import WorkerContext


def decode(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Decode one item's latents into its pixels: the whole picture, or the region that a mask-aware edit changed."""
    (item,) = items
    work = item.work
    assert isinstance(work, Decode)
    (latents,) = (context.read(ref) for ref in item.inputs)
    if work.active is None:
        context.shared(work.pixels).copy_(context.models[item.model].decode(latents, work.width, work.height))
    else:
        _decode_region(context, item, work, latents)
    return [ItemResult(item.request_id, item.node)]


def _decode_region(context: WorkerContext, item: Item, work: Decode, latents: Tensor) -> None:
    assert work.active is not None
    assert work.template is not None
    family, pixels = context.models[item.model], context.shared(work.pixels)
    active, template = context.shared(work.active).long().to(latents.device), context.shared(work.template)
    if work.template_latents is not None:
        clean, _ = context.clean_latents(item.model, work.template_latents, latents.shape[0])
        latents = clean.to(latents.device).index_copy(0, active, latents[active].to(clean.dtype))
    region, (left, top, right, bottom) = family.decode_region(latents, active, work.width, work.height)
    pixels.copy_(template)
    pixels[top:bottom, left:right] = region

"""Runs the op decode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.messages.worker import Item, ItemResult
from core.scheduling.ops.decode import Decode
from model_executor.kernels.gpu_tables import upload
from model_executor.worker.ops.context import WorkerContext


def decode(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Decode one item's latents into its pixels: the whole picture, or the region that a mask-aware edit changed. A
    picture that only other nodes read is in no memory that the caller sees.
    """
    (item,) = items
    work = item.work
    assert isinstance(work, Decode)
    (latents,) = (context.read(ref) for ref in item.inputs)
    own = None if work.pixels is None else context.shared(work.pixels)
    pixels = torch.empty(work.height, work.width, 3, dtype=torch.uint8) if own is None else own
    if work.active is None:
        pixels.copy_(context.models[item.model].decode(latents, work.width, work.height))
    else:
        _decode_region(context, item, work, latents, pixels)
    made = {"picture": pixels if own is None else pixels.clone()} if work.is_read else {}
    return [ItemResult(item.request_id, item.node, context.put(item, made))]


def _decode_region(context: WorkerContext, item: Item, work: Decode, latents: Tensor, pixels: Tensor) -> None:
    assert work.active is not None
    assert work.template is not None
    family = context.models[item.model]
    # They stay on the host, which looks for the box around them: on a GPU it would wait for each edge.
    active, template = context.shared(work.active).long(), context.shared(work.template)
    if work.template_latents is not None:
        clean, _ = context.clean_latents(item.model, work.template_latents, latents.shape[0])
        there = upload(active, latents.device)
        latents = clean.to(latents.device).index_copy(0, there, latents[there].to(clean.dtype))
    region, (left, top, right, bottom) = family.decode_region(latents, active, work.width, work.height)
    pixels.copy_(template)
    pixels[top:bottom, left:right] = region

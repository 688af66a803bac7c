"""Runs the op embed."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.functional import normalize

from core.messages.worker import Item, ItemResult
from core.scheduling.ops.embed import Embed
from model_executor.worker.ops.context import WorkerContext


def embed(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Write one item's embedding to the memory that its request has for it."""
    (item,) = items
    work = item.work
    assert isinstance(work, Embed)
    (embeds,) = (context.read(ref) for ref in item.inputs)
    mean = normalize(embeds[: work.num_tokens or len(embeds)].float().mean(dim=0), dim=0).cpu()
    context.shared(work.embedding)[: len(mean)] = mean
    return [ItemResult(item.request_id, item.node, shapes={"embedding": tuple(mean.shape)})]

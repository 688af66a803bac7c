"""Runs the op recall."""

from __future__ import annotations

from collections.abc import Sequence

from core.messages.worker import Item, ItemResult
from core.scheduling.ops.recall import Recall
from model_executor.worker.ops.context import WorkerContext


def recall(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Copy one item's state to where its family keeps latents between steps."""
    (item,) = items
    work, family = item.work, context.models[item.model]
    assert isinstance(work, Recall)
    latents = context.shared(work.state).to(context.device, family.latents_dtype, copy=True)
    return [ItemResult(item.request_id, item.node, context.put(item, {"latents": latents}))]

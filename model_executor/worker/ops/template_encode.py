"""Runs the op template_encode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.messages.worker import Item, ItemResult
from core.scheduling.ops.template_encode import TemplateEncode
from model_executor.worker.ops.context import WorkerContext


def encode_template(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Encode one template into its entry of the activation cache."""
    (item,) = items
    work = item.work
    assert isinstance(work, TemplateEncode)
    template = context.shared(work.template)
    clean = context.models[item.model].encode_template(template, cache_salt=work.cache_salt)
    context.pages.create(work.out).copy_(clean.contiguous().view(torch.uint8).flatten())
    return [ItemResult(item.request_id, item.node)]

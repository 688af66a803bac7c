"""Runs the op template_encode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.messages.worker import Item, ItemResult
from core.scheduling.ops.template_encode import TemplateEncode
from model_executor.worker.ops.context import WorkerContext


def encode_template(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Encode one template and its references into their entry of the activation cache."""
    (item,) = items
    work = item.work
    assert isinstance(work, TemplateEncode)
    family = context.models[item.model]
    pictures = [context.shared(picture) for picture in (work.template, *work.references)]
    clean = torch.cat([family.encode_template(picture, cache_salt=work.cache_salt) for picture in pictures])
    context.pages.create(work.out).copy_(clean.view(torch.uint8).flatten())
    return [ItemResult(item.request_id, item.node)]

"""Runs the op text_encode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.messages.worker import Item, ItemResult
from core.scheduling.ops.text_encode import TextEncode
from model_executor.worker.ops.context import WorkerContext


def encode_text(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Embed one item's prompts."""
    (item,) = items
    work = item.work
    assert isinstance(work, TextEncode)
    prompts = [work.prompt] if work.negative_prompt is None else [work.prompt, work.negative_prompt]
    family = context.family(item.model, work.patches)
    seen: list[Tensor] = []
    if family.text_sees_template:
        seen = [context.picture(work.template, work.width, work.height), *map(context.shared, work.references)]
    cache, length = context.prompts[item.model], work.max_sequence_length
    texts = [cache.encode(prompt, length, work.content_id, seen, work.cache_salt, work.patches) for prompt in prompts]
    named = {
        "prompt_embeds": _below([text.prompt_embeds for text in texts]),
        "text_lengths": torch.tensor([len(text.prompt_embeds) for text in texts]),
        "pooled_prompt_embeds": _rows([text.pooled_prompt_embeds for text in texts]),
    }
    tensors, first = context.put(item, named), texts[0]
    result = ItemResult(
        item.request_id, item.node, tensors, text_tokens=first.num_tokens, prompt_truncated=first.truncated
    )
    return [result]


def _below(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors concatenated along rows; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors stacked, one row each; a view of a single one."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))

"""Runs the op prime."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.handles import TensorKey
from core.messages.worker import Item, ItemResult
from core.scheduling.ops.prime import Prime
from model_executor.models.base import PrimeRow
from model_executor.worker.ops.context import WorkerContext, noise_id


def prime(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Prime one chunk: all keyframes of the batch through the same blocks. Stores hidden states for the next."""
    works = [work for item in items if isinstance(work := item.work, Prime)]
    rows = [_prime_row(context, item, work) for item, work in zip(items, works, strict=True)]
    hidden = context.models[items[0].model].prime(rows, works[0].blocks)
    for item, work, tensors in zip(items, works, hidden, strict=True):
        context.store.put_series(_hidden_key(item, work), tensors)
    return [ItemResult(item.request_id, item.node) for item in items]


def _prime_row(context: WorkerContext, item: Item, work: Prime) -> PrimeRow:
    family, cache = context.family(item.model, work.patches), context.prompts[item.model]
    seen = [context.shared(picture) for picture in work.seen]
    text = cache.encode(work.prompt, work.max_sequence_length, work.content_id, seen, work.cache_salt, work.patches)
    grid = family.grid(work.width, work.height)
    references = tuple(family.grid(*size) for size in work.reference_sizes)
    sigma = torch.full((), work.sigma, dtype=torch.float32, device=text.prompt_embeds.device)  # without an upload
    clean, others = context.clean_latents(item.model, work.latents, grid[0] * grid[1])
    noise = family.content_noise(clean, noise_id(work.content_id, work.cache_salt))
    latents, condition = family.prime_inputs(clean, noise, sigma, others)
    is_first = work.blocks[0] == 0
    return PrimeRow(
        latents=latents,
        condition=condition,
        prompt_embeds=text.prompt_embeds,
        pooled_prompt_embeds=text.pooled_prompt_embeds,
        sigma=sigma,
        guidance_scale=work.guidance_scale,
        patches=work.patches,
        grid=grid,
        references=references,
        hidden=None if is_first else context.store.get_series(_hidden_key(item, work)),
        entry=context.pages.create(work.out) if is_first else context.pages.entry(work.out),
    )


def _hidden_key(item: Item, work: Prime) -> TensorKey:
    """The key of a keyframe's hidden state between chunks."""
    return TensorKey(item.request_id, item.node, f"hidden-{work.sigma}")

"""Runs the op segment."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from core.errors import NothingFoundError
from core.failure import Failure
from core.messages.worker import Item, ItemResult
from core.scheduling.ops.segment import Segment
from core.selection import Selection
from core.validation import shorten
from model_executor.worker.ops.context import WorkerContext
from model_executor.worker.stores.mask_finder import Asked, FoundMask, active_tokens, grown


def segment(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Find the masks of these items, whose models share a segmenter."""
    finder = context.finders[items[0].model]
    before = finder.num_seen
    found = finder.find([_asked(context, item) for item in items])
    is_usual = finder.num_seen - before == len(items)  # no picture was known
    return [_result(context, item, mask, is_usual=is_usual) for item, mask in zip(items, found, strict=True)]


def _asked(context: WorkerContext, item: Item) -> Asked:
    work = item.work
    assert isinstance(work, Segment)
    return Asked(context.shared(work.template), work.content_id, work.cache_salt, work.search.selection)


def _result(context: WorkerContext, item: Item, found: FoundMask, *, is_usual: bool) -> ItemResult:
    work = item.work
    assert isinstance(work, Segment)
    if not found.mask.any():
        return ItemResult(item.request_id, item.node, failure=Failure.of(_nothing_found(work.search.selection)))
    mask = grown(found.mask, work.search.grow)
    active = active_tokens(mask, work.search.margin, context.token_size(item.model))
    context.shared(work.mask).copy_(mask)
    context.shared(work.active)[: len(active)].copy_(active)
    tensors = context.put(item, {"mask": mask.byte()})
    result = ItemResult(item.request_id, item.node, tensors, active_tokens=len(active), score=found.score)
    return msgspec.structs.replace(result, is_usual=is_usual)


def _nothing_found(selection: Selection) -> NothingFoundError:
    if selection.words:
        what = f"nothing in the picture is found for '{shorten(selection.words)}'; name something that it shows"
        return NothingFoundError(f"Invalid 'mask_prompt': {what}.", param="mask_prompt")
    param, where = ("mask_points", "at the points") if selection.points else ("mask_box", "in the box")
    return NothingFoundError(f"Invalid '{param}': nothing is found {where}; give others.", param=param)

"""Runs the op control_encode."""

from __future__ import annotations

from collections.abc import Sequence

from core.handles import TensorKey
from core.messages.worker import Item, ItemResult
from core.scheduling.ops.control_encode import ControlEncode
from model_executor.worker.ops.context import WorkerContext


def encode_controls(context: WorkerContext, items: Sequence[Item]) -> list[ItemResult]:
    """Encode one item's control pictures."""
    (item,) = items
    work, family = item.work, context.models[item.model]
    assert isinstance(work, ControlEncode)
    pictures = [context.shared(picture) for picture in work.pictures]
    encoded = family.encode_controls(pictures, work.seed, is_exact=work.is_exact)
    key = TensorKey(item.request_id, item.node, "controls", item.version)
    return [ItemResult(item.request_id, item.node, (context.store.put_series(key, encoded),))]

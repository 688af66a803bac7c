"""Salvages messages that cannot be encoded or decoded as a whole: the requests affected get an answer, others continue.

None of this runs in normal operation. A message that needs it shows a bug, which must affect no more than the requests
in the damaged parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from core.errors import MessageError, StencilError
from core.failure import Failure
from core.handles import Tier
from core.messages.codec import DECODE_ERRORS, ENCODE_ERRORS, MessageDecoder, decode_member, encode
from core.messages.engine import (
    Aborted,
    AdapterAdded,
    EngineFailed,
    EngineOutputs,
    Failed,
    Finished,
    PartialImage,
    TemplatePrimed,
)
from core.messages.worker import Batch, BatchResult, Item, ItemResult, PageCopied, StepPlan

T = TypeVar("T")
RequestOutput = PartialImage | Finished | TemplatePrimed | AdapterAdded | Failed | Aborted

_OUTPUTS: MessageDecoder[RequestOutput] = MessageDecoder(RequestOutput)


def failure_of(error: MessageError) -> Failure:
    """The failure for the requests in such a message; its cause's, if a value is out of its field's range."""
    cause = error.__cause__
    return Failure.of(cause if isinstance(cause, StencilError) else error)


def read_member(payload: bytes | msgspec.Raw, name: str, kind: type[T]) -> T | None:
    """One member of a message, even if others are damaged; None if it cannot be read."""
    raw = _members(payload).get(name)
    return None if raw is None else _read(raw, kind)


# ------------------------------------------------------------------------------------------ from engines to the server


def readable_outputs(payload: bytes, error: MessageError) -> list[RequestOutput]:
    """The outputs in an engine's message; terminal ones that cannot be read become Failed."""
    outputs = read_member(payload, "outputs", list[msgspec.Raw]) or []
    return [output for raw in outputs if (output := _output(raw, failure_of(error))) is not None]


def _output(raw: msgspec.Raw, failure: Failure) -> RequestOutput | None:
    try:
        return _OUTPUTS.decode(bytes(raw))
    except MessageError:
        request_id = read_member(raw, "request_id", str)
        is_terminal = read_member(raw, "type", str) != PartialImage.__name__
        return Failed(request_id=request_id, failure=failure) if request_id is not None and is_terminal else None


def sendable_outputs(message: EngineOutputs | EngineFailed) -> EngineOutputs | EngineFailed:
    """The message with a Failed for each terminal output that cannot be encoded."""
    outputs = tuple(saved for output in message.outputs if (saved := _sendable_output(output)) is not None)
    return msgspec.structs.replace(message, outputs=outputs)


def _sendable_output(output: RequestOutput) -> RequestOutput | None:
    try:
        encode(output)
    except MessageError as error:
        is_terminal = not isinstance(output, PartialImage)
        return Failed(request_id=output.request_id, failure=failure_of(error)) if is_terminal else None
    return output


# ------------------------------------------------------------------------------------------ between engines and workers


class WithheldItems:
    """Failed results of items that were removed from their batches, kept until the rest of the batch is done."""

    def __init__(self) -> None:
        self._failed: dict[int, tuple[ItemResult, ...]] = {}  # batch id -> results of its removed items

    def update(self, failed: Mapping[int, tuple[ItemResult, ...]]) -> None:
        """Add results by batch id."""
        self._failed.update(failed)

    def complete(self, result: BatchResult) -> BatchResult:
        """The result with those of its batch's removed items."""
        failed = self._failed.pop(result.batch_id, ())
        return msgspec.structs.replace(result, items=result.items + failed) if failed else result


@dataclass
class SavedPlan:
    """The part of a plan that can be carried out."""

    plan: StepPlan
    withheld: dict[int, tuple[ItemResult, ...]] = field(default_factory=dict)  # batch id -> results of removed items
    answers: list[BatchResult | PageCopied] = field(default_factory=list)  # to batches and copies removed as a whole


def sendable_plan(plan: StepPlan, rank: int, now: float) -> SavedPlan:
    """The plan without the items that cannot be encoded."""
    saved, batches = SavedPlan(plan), []
    for batch in plan.batches:
        results = [(item, _unsendable(item)) for item in batch.items]
        sound = tuple(item for item, failed in results if failed is None)
        failed = tuple(failed for _, failed in results if failed is not None)
        if _take(saved, batch.id, sound, failed, rank, now):
            batches.append(msgspec.structs.replace(batch, items=sound))
    saved.plan = msgspec.structs.replace(plan, batches=tuple(batches))
    return saved


def _unsendable(item: Item) -> ItemResult | None:
    try:
        msgspec.msgpack.encode(item)
    except ENCODE_ERRORS as error:
        return ItemResult(item.request_id, item.node, failure=Failure.of(error))
    return None


def _take(saved: SavedPlan, batch_id: int, sound: Sized, failed: tuple[ItemResult, ...], rank: int, now: float) -> bool:
    """Note a batch's failed items; whether any items are left."""
    if not sound:
        saved.answers.append(BatchResult(batch_id=batch_id, rank=rank, started=now, seconds=0.0, items=failed))
    elif failed:
        saved.withheld[batch_id] = failed
    return bool(sound)


def readable_plan(payload: bytes, rank: int, now: float, error: MessageError) -> SavedPlan | None:
    """The readable elements of a plan; None if the payload is no plan. A damaged element that names neither a request
    nor an entry of the cache is dropped without an answer.
    """
    seq = read_member(payload, "seq", int)
    if seq is None or read_member(payload, "type", str) != StepPlan.__name__:
        return None
    saved, failure = SavedPlan(StepPlan(seq=seq)), failure_of(error)
    parts = {name: _elements(payload, name, kind) for name, kind in _PARTS.items()}
    batches = [batch or _rest_of_batch(raw, failure, saved, rank, now) for batch, raw in parts["batches"]]
    for copy, raw in parts["copies"]:
        if copy is None and (named := _read(raw, _NamedCopy)) is not None:
            copied = PageCopied(rank, named.key, named.nbytes, named.source, named.target, ok=False, seconds=0.0)
            saved.answers.append(copied)
    sound = {name: tuple(one for one, _ in part if one is not None) for name, part in parts.items()}
    sound["batches"] = tuple(batch for batch in batches if batch is not None)
    saved.plan = msgspec.structs.replace(saved.plan, **sound)
    return saved


_PARTS: dict[str, Any] = {
    name: get_args(kind)[0] for name, kind in get_type_hints(StepPlan).items() if get_origin(kind) is tuple
}
"""The fields of a plan that are tuples -> type of their elements."""


class _NamedCopy(msgspec.Struct):
    key: str
    nbytes: int
    source: Tier
    target: Tier


class _NamedItem(msgspec.Struct):
    request_id: str
    node: str


class _NamedBatch(msgspec.Struct):
    id: int
    items: tuple[msgspec.Raw, ...]


def _rest_of_batch(raw: msgspec.Raw, failure: Failure, saved: SavedPlan, rank: int, now: float) -> Batch | None:
    """The batch with only its readable items; None if nothing of it can be run."""
    named = _read(raw, _NamedBatch)
    if named is None:
        return None
    empty = _read(msgspec.msgpack.encode(_members(raw) | {"items": ()}), Batch)
    items = [(empty and _read(one, Item), _read(one, _NamedItem)) for one in named.items]
    sound = tuple(item for item, _ in items if item is not None)
    failed = tuple(
        ItemResult(name.request_id, name.node, failure=failure)
        for item, name in items
        if item is None and name is not None
    )
    is_left = _take(saved, named.id, sound, failed, rank, now)
    return msgspec.structs.replace(empty, items=sound) if empty is not None and is_left else None


class _NamedResult(msgspec.Struct):
    batch_id: int
    rank: int
    started: float
    seconds: float
    items: tuple[msgspec.Raw, ...]


def readable_result(payload: bytes, error: MessageError) -> BatchResult | None:
    """A worker's result with a failure for each unreadable item; None if the payload is no result."""
    named = _read(payload, _NamedResult)
    if named is None:
        return None
    items = [_read(raw, ItemResult) or _failed_item(raw, failure_of(error)) for raw in named.items]
    sound = tuple(item for item in items if item is not None)
    return BatchResult(named.batch_id, named.rank, named.started, named.seconds, sound)


def _failed_item(raw: msgspec.Raw, failure: Failure) -> ItemResult | None:
    name = _read(raw, _NamedItem)
    return None if name is None else ItemResult(name.request_id, name.node, failure=failure)


def sendable_result(result: BatchResult) -> BatchResult:
    """The result with a failure for each item that cannot be encoded."""
    items = tuple(_sendable_item(item) for item in result.items)
    return msgspec.structs.replace(result, items=items)


def _sendable_item(item: ItemResult) -> ItemResult:
    try:
        msgspec.msgpack.encode(item)
    except ENCODE_ERRORS as error:
        return ItemResult(item.request_id, item.node, failure=Failure.of(error))
    return item


# ----------------------------------------------------------------------------------------------------------- reading


def _members(payload: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    return _read(payload, dict[str, msgspec.Raw]) or {}


def _elements(payload: bytes, name: str, kind: type[T]) -> list[tuple[T | None, msgspec.Raw]]:
    raws: list[msgspec.Raw] = read_member(payload, name, list[msgspec.Raw]) or []
    return [(_read(raw, kind), raw) for raw in raws]


def _read(payload: bytes | msgspec.Raw, kind: type[T]) -> T | None:
    try:
        return msgspec.msgpack.decode(payload, type=kind, dec_hook=decode_member)
    except DECODE_ERRORS:
        return None

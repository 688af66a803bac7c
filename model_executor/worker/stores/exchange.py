"""Exchange: sends values to other ranks, and waits for theirs, while batches run (deferred inputs).

A `Delivery` is executed as soon as this rank has the value: at once, or after the batch that makes it. A series may go
before that in parts, as it is made: its batch looks for deliveries in plans that have come meanwhile. A rank that waits
for a value within a batch waits only for batches dispatched before its own, and never in a circle. If the other rank
dies, the engine says so, and the wait ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from core.handles import TensorKey
from core.ipc.peer_sockets import PeerSockets
from core.messages.peers import Parcel, RankGone, ToInbox
from core.messages.worker import Batch, Delivery, StepPlan
from model_executor.worker.stores.tensor_store import SERIES, MissingValueError, TensorStore

Run = tuple[str, str, int]
"""Request id, node, version of what it makes: one run of a node."""


_Sending = tuple[int, Delivery]
"""Sequence number of its plan, and a delivery."""


@dataclass(slots=True)
class _Awaited:
    """What the batch that runs waits for under one key."""

    source: int  # rank
    number: int  # of messages still to come


class Exchange:
    """One worker's end. sockets: None in an engine with one rank, which has nothing to exchange."""

    def __init__(
        self,
        store: TensorStore,
        sockets: PeerSockets | None = None,
        newly_come: Callable[[], Iterable[StepPlan]] = tuple,
    ) -> None:
        """newly_come: see `Orders`."""
        self._store = store
        self._sockets = sockets
        self._newly_come = newly_come
        self._decoder: msgspec.msgpack.Decoder[ToInbox] = msgspec.msgpack.Decoder(ToInbox)
        self._seq = 0  # of the plan in execution
        self._to_send: list[Delivery] = []  # of values that its batches make
        self._ahead: list[_Sending] = []  # of later plans
        self._num_sent: dict[_Sending, int] = {}  # of a series that is made: tensors that are sent
        self._awaited: dict[TensorKey, _Awaited] = {}  # by the batch that runs
        self._coming: dict[TensorKey, list[Tensor]] = {}  # of these, the tensors of series that have come
        self._failed: set[TensorKey] = set()  # of these, values that were not made
        self._early: list[tuple[Parcel, npt.NDArray[Any]]] = []  # received for later batches
        self._gone: dict[int, int] = {}  # rank that has died -> the first plan that is not void for it
        self._waited = 0.0  # seconds

    def close(self) -> None:
        """Close the sockets."""
        if self._sockets is not None:
            self._sockets.close()

    # ------------------------------------------------------------------------------------------------ sending

    def begin_plan(self, seq: int, deliveries: Iterable[Delivery], batches: Sequence[Batch]) -> None:
        """Drop what has come for earlier plans, whose batches did not run; send what this rank has already; note what
        these batches will make.
        """
        if self._sockets is None:
            return
        self._seq = seq
        self._receive_all()
        self._early = [(parcel, data) for parcel, data in self._early if parcel.seq >= seq]
        self._to_send.clear()
        self._ahead = [sending for sending in self._ahead if sending[0] > seq]
        self._num_sent = {sending: number for sending, number in self._num_sent.items() if sending[0] >= seq}
        to_come = {run for batch in batches for run in _runs(batch)}
        for delivery in deliveries:
            if _run_of(delivery) in to_come:
                self._to_send.append(delivery)
            else:
                self._send(delivery)

    def publish(self, key: TensorKey, made: Sequence[Tensor]) -> None:
        """Send what is new of a series to the ranks that wait for it, as far as their inboxes have room. made: its
        tensors so far, in the batch that runs; one that is tried again begins with the same ones.
        """
        if self._sockets is None:
            return
        self._ahead += [(plan.seq, delivery) for plan in self._newly_come() for delivery in plan.deliveries]
        for sending in [*((self._seq, delivery) for delivery in self._to_send), *self._ahead]:
            (seq, delivery), sent = sending, self._num_sent.get(sending, 0)
            if delivery.key != key or sent >= len(made) or not self._sockets.has_room(delivery.target):
                continue
            if self._sockets.post(delivery.target, *self._part(seq, key, made, sent, is_last=False)):
                self._num_sent[sending] = len(made)

    def end_batch(self, batch: Batch) -> None:
        """Send what the batch has made, or that it has not."""
        made = set(_runs(batch)) if self._to_send else set()
        mine = [delivery for delivery in self._to_send if _run_of(delivery) in made]
        for delivery in mine:
            self._to_send.remove(delivery)
            self._send(delivery)

    def _send(self, delivery: Delivery) -> None:
        """Send a value, or what is left of it."""
        assert self._sockets is not None, "an engine with one rank delivers nothing"
        key, sent = delivery.key, self._num_sent.pop((self._seq, delivery), 0)
        ref, series = self._store.find(key), self._store.get_series(key)
        if series:
            header, data = self._part(self._seq, key, series, sent, is_last=True)
        else:
            header = msgspec.msgpack.encode(Parcel(self._seq, key, ref))
            data = self._store.packed(() if ref is None else (self._store.get(key),))
        while not self._is_void_for(delivery.target) and not self._sockets.post(delivery.target, header, data):
            self._receive_all()  # the other rank may be waiting for room here, too; or it has died
            self._sockets.wait_for_room(delivery.target)

    def _part(
        self, seq: int, key: TensorKey, series: Sequence[Tensor], start: int, *, is_last: bool
    ) -> tuple[bytes, Sequence[npt.NDArray[np.uint8]]]:
        """A message with the tensors of a series from number `start` on: (header, data)."""
        ref = self._store.describe(key, series[start:])
        return msgspec.msgpack.encode(Parcel(seq, key, ref, start, is_last)), self._store.packed(series[start:])

    def _is_void_for(self, rank: int) -> bool:
        """Whether a rank has died since the plan in execution was sent."""
        return self._seq < self._gone.get(rank, 0)

    # ------------------------------------------------------------------------------------------------ receiving

    def begin_batch(self, batch: Batch) -> None:
        """Note which values other ranks send for this batch."""
        for item in batch.items:
            for ref in item.inputs:
                if ref.is_deferred and ref.rank != self._store.rank:
                    self._awaited.setdefault(ref.key, _Awaited(ref.rank, 0)).number += 1
        if self._awaited:
            early, self._early = self._early, []
            for parcel, data in early:
                self._take(parcel, data)
            self._give_up()

    def wait(self, key: TensorKey) -> None:
        """Wait until a deferred value of the batch that runs is in the tensor store. Raises MissingValueError if it was
        not made, or its rank has died.
        """
        while key in self._awaited:
            self._receive()
        self.check(key)

    def check(self, key: TensorKey) -> None:
        """Raises MissingValueError for a deferred value that is known not to be made."""
        if key in self._failed:
            raise MissingValueError(f"{key.node}.{key.name} of {key.request_id} was not made")

    def part(self, key: TensorKey, number: int) -> Tensor:
        """The tensor of this number of a series, waited for if another rank sends it to the batch that runs. Raises
        MissingValueError if it was not made, or its rank has died.
        """
        while key in self._awaited and number >= len(self._coming.get(key, ())):
            self._receive()
        series = self._coming.get(key) or self._store.get_series(key)
        if key in self._failed or not series:
            raise MissingValueError(f"{key.node}.{key.name} of {key.request_id} was not made")
        return series[number]

    def finish_batch(self) -> None:
        """Receive what the batch did not wait for, so that nothing arrives after it has ended."""
        while self._awaited:
            self._receive()
        self._failed.clear()
        self._coming.clear()

    def take_waited(self) -> float:
        """Seconds spent waiting since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _receive(self) -> None:
        assert self._sockets is not None, "an engine with one rank receives nothing"
        started = time.monotonic()
        header, data = self._sockets.receive()
        self._waited += time.monotonic() - started
        match self._decoder.decode(header):
            case Parcel() as parcel:
                self._take(parcel, data)
            case RankGone() as gone:
                self._gone[gone.rank] = gone.seq
                self._give_up()

    def _receive_all(self) -> None:
        """Receive what has come, without waiting."""
        assert self._sockets is not None
        while self._sockets.has_message():
            self._receive()

    def _take(self, parcel: Parcel, data: npt.NDArray[Any]) -> None:
        awaited = self._awaited.get(parcel.key) if parcel.seq == self._seq else None
        if awaited is None:
            self._early.append((parcel, data))
            return
        if parcel.ref is None:
            self._failed.add(parcel.key)
        elif parcel.ref.dtype == SERIES:
            coming = self._coming.setdefault(parcel.key, [])
            coming += self._store.read(parcel.ref, data)[len(coming) - parcel.start :]  # two nodes may have it sent
            if parcel.is_last:
                self._store.put_series(parcel.key, coming)
        else:
            self._store.put_bytes(parcel.ref, data)
        awaited.number -= parcel.is_last
        if not awaited.number:
            del self._awaited[parcel.key]

    def _give_up(self) -> None:
        """Wait no more for ranks that have died."""
        for key in [key for key, awaited in self._awaited.items() if self._is_void_for(awaited.source)]:
            del self._awaited[key]
            self._failed.add(key)


def _runs(batch: Batch) -> list[Run]:
    return [(item.request_id, item.node, item.version) for item in batch.items]


def _run_of(delivery: Delivery) -> Run:
    return delivery.key.request_id, delivery.key.node, delivery.key.version
